// Columnwise and simulated quantisers. Included behind kernels_impl.h and like it.

// Rows first_row .. first_row + num - 1 of kLanes columns, of which `count` exist, in FP32.
template <class Type, int num>
NVFP4_FN void load_columns_of(const typename Type::Storage* x, int64_t num_cols, int count,
                              float (&out)[num][kLanes]) {
  for (int i = 0; i < num; ++i) {
    const typename Type::Storage* row = x + i * num_cols;
    if (count == kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) out[i][lane] = Type::load(row[lane]);
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        out[i][lane] = lane < count ? Type::load(row[lane]) : 0.0f;
      }
    }
  }
}

template <int num>
NVFP4_FN void load_columns(const void* x, InputType type, int64_t num_cols, int64_t first_row,
                           int64_t first_col, int count, float (&out)[num][kLanes]) {
  const int64_t first = first_row * num_cols + first_col;
  if (type == InputType::kBFloat16) {
    load_columns_of<BFloat16>(static_cast<const uint16_t*>(x) + first, num_cols, count, out);
  } else if (type == InputType::kHalf) {
    load_columns_of<Half>(static_cast<const uint16_t*>(x) + first, num_cols, count, out);
  } else {
    load_columns_of<Float>(static_cast<const uint32_t*>(x) + first, num_cols, count, out);
  }
}

template <int num>
NVFP4_FN void lane_amax(const float (&x)[num][kLanes], float (&amax)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) amax[lane] = 0.0f;
  for (int i = 0; i < num; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) amax[lane] = max_magnitude(amax[lane], x[i][lane]);
  }
}

NVFP4_FN int lanes_from(int64_t col, int64_t num_cols) {
  return num_cols - col < kLanes ? static_cast<int>(num_cols - col) : kLanes;
}

float column_amax(const ColumnArgs& args, int64_t row_block) {
  const int64_t first_row = row_block * kBlock;
  if (!args.rotated) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x);
    return amax(x + first_row * args.num_cols * size_of(args.type), args.type,
                kBlock * args.num_cols);
  }
  Tile tile;
  alignas(64) float found[kLanes];
  float largest = 0.0f;
  for (int64_t col = 0; col < args.num_cols; col += kLanes) {
    const int count = lanes_from(col, args.num_cols);
    load_columns(args.x, args.type, args.num_cols, first_row, col, count, tile.x);
    rotate(tile.x);
    lane_amax(tile.x, found);
    for (int lane = 0; lane < kLanes; ++lane) largest = max_magnitude(largest, found[lane]);
  }
  return largest;
}

void quantize_columns(const ColumnArgs& args, int64_t row_block, float amax) {
  Outer outer;
  outer.s_enc = encode_scale(amax, args.e4m3_max);
  outer.s_dec = decode_scale(outer.s_enc);
  const int64_t num_blocks = args.num_rows / kBlock;
  Tile tile;
  Scales scales;
  Codes codes;
  alignas(64) float block_amax[kLanes];
  for (int64_t col = 0; col < args.num_cols; col += kLanes) {
    const int count = lanes_from(col, args.num_cols);
    load_columns(args.x, args.type, args.num_cols, row_block * kBlock, col, count, tile.x);
    if (args.rotated) rotate(tile.x);
    lane_amax(tile.x, block_amax);
    for (int lane = 0; lane < kLanes; ++lane) {
      scales.code[lane] = block_scale(block_amax[lane], outer.s_enc);
    }
    finish_scales(scales, outer);
    if (args.stochastic) {
      RandomTile random;
      const uint64_t first = static_cast<uint64_t>(col * num_blocks + row_block) * 2;
      draw_tile(first, static_cast<uint64_t>(num_blocks) * 2, args.key, random);
      encode_tile_stochastic(tile, scales, random, codes);
    } else {
      encode_tile(tile, scales, codes);
    }
    for (int lane = 0; lane < count; ++lane) {
      const int64_t block = (col + lane) * num_blocks + row_block;
      const uint32_t words[2] = {codes.low[lane], codes.high[lane]};
      std::memcpy(args.codes + block * 8, words, sizeof words);
      args.block_scales[block] = static_cast<uint8_t>(scales.code[lane]);
    }
  }
}

void quantize_mxfp8_columns(const void* x, InputType type, int64_t num_rows, int64_t num_cols,
                            int64_t row_block, uint8_t* codes, uint8_t* block_scales) {
  alignas(64) float values[kMxfp8Block][kLanes], block_amax[kLanes], multiplier[kLanes];
  alignas(64) uint32_t e[kLanes];
  alignas(64) uint8_t bytes[kMxfp8Block][kLanes];
  for (int64_t col = 0; col < num_cols; col += kLanes) {
    const int count = lanes_from(col, num_cols);
    load_columns(x, type, num_cols, row_block * kMxfp8Block, col, count, values);
    lane_amax(values, block_amax);
    for (int lane = 0; lane < kLanes; ++lane) {
      e[lane] = mxfp8_block_scale(block_amax[lane]);
      multiplier[lane] = mxfp8_block_multiplier(e[lane]);
    }
    for (int i = 0; i < kMxfp8Block; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float scaled = multiply(values[i][lane], multiplier[lane]);
        bytes[i][lane] = static_cast<uint8_t>(encode_e4m3(scaled));
      }
    }
    for (int lane = 0; lane < count; ++lane) {
      uint8_t* to = codes + (col + lane) * num_rows + row_block * kMxfp8Block;
      for (int i = 0; i < kMxfp8Block; ++i) to[i] = bytes[i][lane];
      block_scales[(col + lane) * (num_rows / kMxfp8Block) + row_block] =
          static_cast<uint8_t>(e[lane]);
    }
  }
}

template <class Type>
NVFP4_FN void quantize_simulated_row(const typename Type::Storage* x, int64_t num_blocks,
                                     const FloatFormat& format, float s_enc, float* values,
                                     uint8_t* block_scales) {
  const float s_dec = decode_scale(s_enc);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const typename Type::Storage* from = x + block * kBlock;
    const uint32_t code = simulated_block_scale(amax_of<Type>(from, kBlock), s_enc, format);
    const float multiplier = block_multiplier(decode_e4m3(code), s_dec);
    block_scales[block] = static_cast<uint8_t>(code);
    for (int i = 0; i < kBlock; ++i) {
      const float scaled = multiply(Type::load(from[i]), multiplier);
      values[block * kBlock + i] = round_to_float(scaled, format);
    }
  }
}

void quantize_simulated(const void* x, InputType type, int64_t num_cols, const FloatFormat& format,
                        float amax, float* values, uint8_t* block_scales) {
  const float s_enc = simulated_encode_scale(amax, format);
  const int64_t num_blocks = num_cols / kBlock;
  switch (type) {
    case InputType::kBFloat16:
      return quantize_simulated_row<BFloat16>(static_cast<const uint16_t*>(x), num_blocks, format,
                                              s_enc, values, block_scales);
    case InputType::kHalf:
      return quantize_simulated_row<Half>(static_cast<const uint16_t*>(x), num_blocks, format,
                                          s_enc, values, block_scales);
    default:
      return quantize_simulated_row<Float>(static_cast<const uint32_t*>(x), num_blocks, format,
                                           s_enc, values, block_scales);
  }
}
