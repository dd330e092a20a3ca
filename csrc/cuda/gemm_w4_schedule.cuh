// Which tiles a CTA computes, from the group boundaries alone: no counters, no host.
#pragma once

#include "async_copy.cuh"
#include "gemm_w4.cuh"

namespace megatron_nvfp4::cuda {

SM90_FN int load_shared(uint32_t address) {
  int v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
SM90_FN void store_shared(uint32_t address, int v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

SM90_FN int4 load_shared_int4(uint32_t address) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
SM90_FN void store_shared_int4(uint32_t address, int4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Tables in shared memory by 32-bit address, which costs one register where pointers cost six.
struct Schedule {
  uint32_t tables;
  int num_groups;

  // sort_groups reads four of the first table at once: three more than there are groups.
  static constexpr int num_bytes(int num_groups) { return 4 * (3 * num_groups + 4); }
  // The items before the group at a place in the order of work.
  SM90_MEMBER uint32_t first(int place) const { return tables + 4 * place; }
  // The group at a place.
  SM90_MEMBER uint32_t group(int place) const { return first(num_groups + 3 + place); }
  // First row of a group; of num_groups, the last row's end.
  SM90_MEMBER uint32_t start(int group) const { return first(2 * num_groups + 3 + group); }
  SM90_MEMBER int rows(int group) const {
    return max(0, load_shared(start(group + 1)) - load_shared(start(group)));
  }
};

// A tile: rows `row` .. `row + num_rows` of the group times one tile of features.
struct Item {
  int group, row, num_rows, feature_tile;
};

// A group's rows as few tiles of nearly equal size, each but the last a multiple of 16, or of 8
// where the largest is that only.
SM90_FN int num_tiles(int num_rows, int max_tokens) {
  return (num_rows + max_tokens - 1) / max_tokens;
}
SM90_FN int tile_rows(int num_rows, int num_tiles, int max_tokens) {
  const int mask = max_tokens % 16 ? 7 : 15;
  return ((num_rows + num_tiles - 1) / num_tiles + mask) & ~mask;
}

SM90_FN int sum_below(int value) {  // inclusive prefix sum over the lanes of a warp
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(0xFFFFFFFFu, value, d);
    if (lane >= d) value += below;
  }
  return value;
}

// By all threads: boundaries, and groups in their own order.
SM90_FN void load_boundaries(const Schedule& s, const void* offsets, bool long_offsets) {
  for (int g = threadIdx.x; g <= s.num_groups; g += blockDim.x) {
    store_shared(s.start(g),
                 long_offsets ? static_cast<int>(__ldg(static_cast<const long long*>(offsets) + g))
                              : __ldg(static_cast<const int*>(offsets) + g));
    if (g < s.num_groups) store_shared(s.group(g), g);
  }
}

// By all threads, between barriers: places groups by the rows of their tiles, the most first, equal
// ones by number: every CTA finds the same order. A thread counts the groups before its own.
SM90_FN void sort_groups(const Schedule& s, int max_tokens) {
  for (int g = threadIdx.x; g < s.num_groups + 3; g += blockDim.x) {
    int key = -1;
    if (g < s.num_groups) {
      const int rows = s.rows(g),
                size = rows ? tile_rows(rows, num_tiles(rows, max_tokens), max_tokens) : 0;
      key = size * s.num_groups + s.num_groups - 1 - g;
    }
    store_shared(s.first(g), key);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < s.num_groups; g += blockDim.x) {
    const int mine = load_shared(s.first(g));
    int place = 0;
#pragma unroll 4
    for (int other = 0; other < s.num_groups; other += 4) {
      const int4 keys = load_shared_int4(s.first(other));
      place += (keys.x > mine) + (keys.y > mine) + (keys.z > mine) + (keys.w > mine);
    }
    store_shared(s.group(place), g);
  }
  __syncthreads();
}

// By all threads, once the order is known: fills s.first and returns the number of items. sums: one
// word for each 32 groups; a barrier passed and another follows before s.first is read.
SM90_FN int count_items(const Schedule& s, int max_tokens, int feature_tiles, uint32_t sums) {
  const int lane = threadIdx.x % 32, num_spans = (s.num_groups + 31) / 32;
  for (int base = threadIdx.x & ~31; base < s.num_groups; base += blockDim.x) {
    const int place = base + lane;
    int items = 0;
    if (place < s.num_groups) {
      items = num_tiles(s.rows(load_shared(s.group(place))), max_tokens) * feature_tiles;
    }
    const int sum = sum_below(items);
    if (place < s.num_groups) store_shared(s.first(place), sum - items);
    if (lane == 31) store_shared(sums + base / 8, sum);
  }
  __syncthreads();
  const int mine = lane < num_spans ? load_shared(sums + 4 * lane) : 0, sum = sum_below(mine);
  for (int base = threadIdx.x & ~31; base < s.num_groups; base += blockDim.x) {
    const int before = __shfl_sync(0xFFFFFFFFu, sum - mine, base / 32), place = base + lane;
    if (place < s.num_groups) store_shared(s.first(place), load_shared(s.first(place)) + before);
  }
  return __shfl_sync(0xFFFFFFFFu, sum, 31);
}

// By a whole warp: item `index`. Two rounds of 32 comparisons find the last place whose first item
// is not behind it.
SM90_FN Item find_item(const Schedule& s, int max_tokens, int index) {
  const int lane = threadIdx.x % 32, span = (s.num_groups + 31) / 32;
  const auto last_before = [&](int place, bool in_span) {
    return 31 - __clz(__ballot_sync(0xFFFFFFFFu, in_span && place < s.num_groups &&
                                                     load_shared(s.first(place)) <= index));
  };
  int place = last_before(lane * span, true) * span;
  if (span > 1) place += last_before(place + lane, lane < span);
  Item item;
  item.group = load_shared(s.group(place));
  const int start = load_shared(s.start(item.group)), rows = s.rows(item.group);
  const int tiles = num_tiles(rows, max_tokens), size = tile_rows(rows, tiles, max_tokens);
  const int rest = index - load_shared(s.first(place));
  item.feature_tile = rest / tiles;
  item.row = start + rest % tiles * size;
  item.num_rows = min(size, start + rows - item.row);
  return item;
}

// The CTA's item in each round: rounds alternate in direction, so that with sorted groups every CTA
// gets tiles of about the same sum.
SM90_FN int item_in_round(int round) {
  return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

}  // namespace megatron_nvfp4::cuda
