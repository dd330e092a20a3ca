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

// Tables in shared memory by 32-bit address, which costs one register where pointers cost six.
struct Schedule {
  uint32_t tables;
  int num_groups;

  static constexpr int num_bytes(int num_groups) { return 4 * (3 * num_groups + 1); }
  // First row of a group; of num_groups, the last row's end.
  SM90_MEMBER uint32_t start(int group) const { return tables + 4 * group; }
  // The group at a place in the order of work, and the items before it.
  SM90_MEMBER uint32_t group(int place) const { return start(num_groups + 1 + place); }
  SM90_MEMBER uint32_t first(int place) const { return start(2 * num_groups + 1 + place); }
  SM90_MEMBER int rows(int group) const {
    return max(0, load_shared(start(group + 1)) - load_shared(start(group)));
  }
};

// A tile: rows `row` .. `row + num_rows` of the group times one tile of features.
struct Item {
  int group, row, num_rows, feature_tile;
};

// A group's rows as few tiles of nearly equal size, each but the last a multiple of 16.
SM90_FN int num_tiles(int num_rows, int max_tokens) {
  return (num_rows + max_tokens - 1) / max_tokens;
}
SM90_FN int tile_rows(int num_rows, int num_tiles) {
  return ((num_rows + num_tiles - 1) / num_tiles + 15) & ~15;
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

// By one warp, after load_boundaries: orders groups by the rows of their tiles, the most first,
// equal ones by number: every CTA finds the same order. counts: 18 words.
SM90_FN void sort_groups(const Schedule& s, int max_tokens, uint32_t counts) {
  const int lane = threadIdx.x % 32;
  const auto key = [&](int g) {  // 0 for the largest tiles, 17 past the end
    if (g >= s.num_groups) return 17;
    const int rows = s.rows(g);
    return rows == 0 ? 16 : 16 - tile_rows(rows, num_tiles(rows, max_tokens)) / 16;
  };
  const auto add = [&](int k, uint32_t same) {  // counts[k] += groups of this key
    __syncwarp();
    if (lane == __ffs(same) - 1)
      store_shared(counts + 4 * k, load_shared(counts + 4 * k) + __popc(same));
    __syncwarp();
  };
  if (lane < 18) store_shared(counts + 4 * lane, 0);
  __syncwarp();
  for (int base = 0; base < s.num_groups; base += 32) {
    const int k = key(base + lane);
    add(k, __match_any_sync(0xFFFFFFFFu, k));
  }
  const int count = lane < 18 ? load_shared(counts + 4 * lane) : 0, sum = sum_below(count);
  if (lane < 18) store_shared(counts + 4 * lane, sum - count);
  __syncwarp();
  for (int base = 0; base < s.num_groups; base += 32) {
    const int k = key(base + lane);
    const uint32_t same = __match_any_sync(0xFFFFFFFFu, k);
    const int place = load_shared(counts + 4 * k) + __popc(same & ((1u << lane) - 1u));
    if (base + lane < s.num_groups) store_shared(s.group(place), base + lane);
    add(k, same);
  }
}

// By one warp, after the order is known: fills s.first and returns the number of items.
SM90_FN int count_items(const Schedule& s, int max_tokens, int feature_tiles) {
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int base = 0; base < s.num_groups; base += 32) {
    const int place = base + lane;
    int items = 0;
    if (place < s.num_groups) {
      items = num_tiles(s.rows(load_shared(s.group(place))), max_tokens) * feature_tiles;
    }
    const int sum = sum_below(items);
    if (place < s.num_groups) store_shared(s.first(place), total + sum - items);
    total += __shfl_sync(0xFFFFFFFFu, sum, 31);
  }
  return total;
}

// By a whole warp: item `index`. Two rounds of 32 comparisons find the last place whose first item
// is not behind it.
SM90_FN Item find_item(const Schedule& s, int max_tokens, int index) {
  const int lane = threadIdx.x % 32, span = (s.num_groups + 31) / 32;
  const auto last_before = [&](int place, bool in_span) {
    return 31 - __clz(__ballot_sync(0xFFFFFFFFu, in_span && place < s.num_groups &&
                                                     load_shared(s.first(place)) <= index));
  };
  int base = last_before(lane * span, true) * span;
  base += last_before(base + lane, lane < span);
  Item item;
  item.group = load_shared(s.group(base));
  const int start = load_shared(s.start(item.group)), rows = s.rows(item.group);
  const int tiles = num_tiles(rows, max_tokens), size = tile_rows(rows, tiles);
  const int rest = index - load_shared(s.first(base));
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
