// Included once per instruction set, like kernels_impl.h and after it. The including file defines
// Vec, a vector of kVec floats, with load, store, broadcast and fused_multiply_add, and the
// register tile: kTileRows rows of 2 * kVec columns. 2 * kVec is a multiple of 8 and at most kLanes
// * 2.

constexpr int kTileCols = 2 * kVec;

// ---- packing: panels of `width` rows or columns, in which the depth is the outer index ----

// `count` of up to kWidth rows of an operand from depth `first` on, the others zero.
template <class Type, int kWidth>
NVFP4_FN void pack_any(const GemmOperand& operand, int64_t first, int64_t depth, int count,
                       float* panel) {
  using Storage = typename Type::Storage;
  const Storage* x = static_cast<const Storage*>(operand.data) + first * operand.depth_stride;
  for (int i = 0; i < count; ++i) {
    const Storage* row = x + i * operand.stride;
    for (int64_t d = 0; d < depth; ++d) {
      panel[d * kWidth + i] = Type::load(row[d * operand.depth_stride]);
    }
  }
  for (int i = count; i < kWidth; ++i) {
    for (int64_t d = 0; d < depth; ++d) panel[d * kWidth + i] = 0.0f;
  }
}

// kWidth rows that lie side by side.
template <class Type, int kWidth>
NVFP4_FN void pack_adjacent(const GemmOperand& operand, int64_t first, int64_t depth,
                            float* panel) {
  using Storage = typename Type::Storage;
  const Storage* x = static_cast<const Storage*>(operand.data) + first * operand.depth_stride;
  for (int64_t d = 0; d < depth; ++d) {
    for (int i = 0; i < kWidth; ++i) {
      panel[d * kWidth + i] = Type::load(x[d * operand.depth_stride + i]);
    }
  }
}

// kWidth rows, a multiple of 8, whose depth is contiguous: by transposing tiles of 8 x 8 words.
template <class Type, int kWidth>
NVFP4_FN void pack_rows(const GemmOperand& operand, int64_t first, int64_t depth, float* panel) {
  using Storage = typename Type::Storage;
  constexpr int kPerWord = 4 / sizeof(Storage), kStep = 8 * kPerWord;
  const Storage* x = static_cast<const Storage*>(operand.data) + first;
  const int row_bytes = static_cast<int>(operand.stride * static_cast<int64_t>(sizeof(Storage)));
  const int64_t whole = depth / kStep * kStep;
  alignas(64) uint32_t words[8 * kLanes];
  for (int i = 0; i < kWidth; i += 8) {
    const Storage* rows = x + i * operand.stride;
    for (int64_t d = 0; d < whole; d += kStep) {
      transpose8(reinterpret_cast<const uint8_t*>(rows + d), row_bytes, words);
      for (int j = 0; j < 8; ++j) {
        float* to = panel + (d + j * kPerWord) * kWidth + i;
        for (int l = 0; l < 8; ++l) {
          const uint32_t word = words[j * kLanes + l];
          to[l] = Type::load(kPerWord == 1 ? word : word & 0xFFFFu);
          if (kPerWord == 2) to[kWidth + l] = Type::load(word >> 16);
        }
      }
    }
    for (int l = 0; l < 8; ++l) {
      for (int64_t d = whole; d < depth; ++d) {
        panel[d * kWidth + i + l] = Type::load(rows[l * operand.stride + d]);
      }
    }
  }
}

template <class Type, int kWidth>
NVFP4_FN void pack_panel(const GemmOperand& operand, int64_t first, int64_t depth, int count,
                         float* panel) {
  constexpr int64_t kMaxStride = 0x7FFFFFFF / static_cast<int64_t>(sizeof(typename Type::Storage));
  if (count == kWidth && operand.stride == 1) {
    pack_adjacent<Type, kWidth>(operand, first, depth, panel);
  } else if (kWidth % 8 == 0 && count == kWidth && operand.depth_stride == 1 &&
             operand.stride >= 0 && operand.stride <= kMaxStride) {
    pack_rows<Type, kWidth>(operand, first, depth, panel);
  } else {
    pack_any<Type, kWidth>(operand, first, depth, count, panel);
  }
}

// `num` rows of an operand from row `row` on, as panels of kWidth, the last one filled with zeros.
template <int kWidth>
void pack(const GemmOperand& operand, int64_t row, int64_t num, int64_t first, int64_t depth,
          float* panels) {
  for (int64_t i = 0; i < num; i += kWidth) {
    const int count = static_cast<int>(num - i < kWidth ? num - i : kWidth);
    GemmOperand part = operand;
    const int64_t offset = (row + i) * operand.stride * size_of(operand.type);
    part.data = static_cast<const uint8_t*>(operand.data) + offset;
    float* panel = panels + i * depth;
    if (operand.type == InputType::kBFloat16) {
      pack_panel<BFloat16, kWidth>(part, first, depth, count, panel);
    } else {
      pack_panel<Float, kWidth>(part, first, depth, count, panel);
    }
  }
}

// ---- the product ----

// Adds the product of the first `rows` rows of a panel of a and of a panel of b to sums.
template <int rows>
void multiply_tile(const float* a, const float* b, int64_t depth, float* sums) {
  Vec sum[rows][2];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    sum[i][0] = load(sums + i * kGemmCols);
    sum[i][1] = load(sums + i * kGemmCols + kVec);
  }
  for (int64_t d = 0; d < depth; ++d) {
    const Vec b0 = load(b + d * kTileCols), b1 = load(b + d * kTileCols + kVec);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const Vec x = broadcast(a[d * kTileRows + i]);
      sum[i][0] = fused_multiply_add(x, b0, sum[i][0]);
      sum[i][1] = fused_multiply_add(x, b1, sum[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    store(sums + i * kGemmCols, sum[i][0]);
    store(sums + i * kGemmCols + kVec, sum[i][1]);
  }
}

using MultiplyTile = void (*)(const float*, const float*, int64_t, float*);

// multiply_tile for 1 to kTileRows rows.
template <int rows = kTileRows>
NVFP4_FN MultiplyTile tile_of(int64_t num_rows) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return tile_of<rows - 1>(num_rows);
  }
  return multiply_tile<rows>;
}

NVFP4_FN void multiply_panels(const float* a, int64_t num_rows, const float* b, int64_t num_cols,
                              int64_t depth, float* sums) {
  for (int64_t col = 0; col < num_cols; col += kTileCols) {
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      tile_of(num_rows - row)(a + row * depth, b + col * depth, depth,
                              sums + row * kGemmCols + col);
    }
  }
}

// ---- what follows the sum ----

NVFP4_FN void scale_row(const GemmScale& scale, int64_t row, int64_t num_cols, float* y) {
  const float* by_row = scale.rows ? scale.rows + row * scale.row_stride : nullptr;
  const float* by_column = scale.columns;
  if (by_column && scale.column_stride) {
    const float factor = by_row ? *by_row : 1.0f;  // times 1 is exact
    for (int64_t i = 0; i < num_cols; ++i) y[i] = multiply(y[i], multiply(factor, by_column[i]));
  } else if (by_row || by_column) {
    const float factor = multiply(by_row ? *by_row : 1.0f, by_column ? *by_column : 1.0f);
    for (int64_t i = 0; i < num_cols; ++i) y[i] = multiply(y[i], factor);
  }
}

// NaN is stored as the positive quiet NaN: which operand's NaN an addition keeps is the machine's.
template <class Type>
NVFP4_FN void store_row(const GemmTask& task, int64_t row, float* y) {
  using Storage = typename Type::Storage;
  Storage* out = static_cast<Storage*>(task.out) + row * task.out_stride;
  if (task.accumulate) {
    for (int64_t i = 0; i < task.num_cols; ++i) y[i] = add(y[i], Type::load(out[i]));
  }
  for (int64_t i = 0; i < task.num_cols; ++i) {
    out[i] = Type::store(select(y[i] == y[i], y[i], float_of(0x7FC00000u)));
  }
}

void finish_rows(const GemmTask& task, float* sums) {
  for (int64_t row = 0; row < task.num_rows; ++row) {
    float* y = sums + row * kGemmCols;
    scale_row(task.scale, row, task.num_cols, y);
    if (task.bias) {
      for (int64_t i = 0; i < task.num_cols; ++i) y[i] = add(y[i], task.bias[i]);
    }
    if (task.out_type == InputType::kBFloat16) {
      store_row<BFloat16>(task, row, y);
    } else {
      store_row<Float>(task, row, y);
    }
  }
}

void gemm(const GemmTask& task, float* scratch) {
  float* sums = scratch;
  float* b = sums + kGemmRows * kGemmCols;
  float* a = b + kGemmCols * kGemmCachedDepth;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    std::memset(sums + row * kGemmCols, 0, kGemmCols * sizeof(float));
  }
  for (int64_t first = 0; first < task.depth; first += kGemmCachedDepth) {
    const int64_t left = task.depth - first;
    const int64_t depth = left < kGemmCachedDepth ? left : kGemmCachedDepth;
    pack<kTileCols>(task.b, 0, task.num_cols, first, depth, b);
    for (int64_t row = 0; row < task.num_rows; row += kGemmCachedRows) {
      const int64_t rows_left = task.num_rows - row;
      const int64_t num_rows = rows_left < kGemmCachedRows ? rows_left : kGemmCachedRows;
      pack<kTileRows>(task.a, row, num_rows, first, depth, a);
      multiply_panels(a, num_rows, b, task.num_cols, depth, sums + row * kGemmCols);
    }
  }
  finish_rows(task, sums);
}
