// Included once per instruction set, inside namespace megatron_nvfp4 and an unnamed namespace,
// after the compiler was told the instruction set. The including file defines kLanes, the number of
// blocks worked on at once (a multiple of 8), and transpose8. This file includes nothing, so that
// no shared inline function is compiled for an instruction set.

// out[j * kLanes + l] = word j of row l, for j, l in 0..7; out is aligned to 32 bytes.
NVFP4_FN void transpose8(const uint8_t* rows, int row_bytes, uint32_t* out);

// One element to FP32, exact, from the low 16 bits of a word or from a whole word.
NVFP4_FN float float_of_bfloat16(uint32_t bits) { return float_of(bits << 16); }

NVFP4_FN float float_of_half(uint32_t bits) {
  const uint32_t low = bits & 0x7FFFu;
  // With exponent field 0 the value is m * 2^-24 = (1 + m/1024) * 2^-14 - 2^-14.
  const float subnormal = subtract(float_of((low << 13) + (113u << 23)), 0.00006103515625f);
  const uint32_t rebias = select(low < 0x7C00u, 112u << 23, 224u << 23);  // Inf and NaN: 31 to 255
  const uint32_t magnitude = select(low < 0x400u, bits_of(subnormal), (low << 13) + rebias);
  return float_of(((bits & 0x8000u) << 16) | magnitude);
}

// FP32 to 16 bits, ties to even, NaN to the quiet NaN.
NVFP4_FN uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(select(x == x, rounded, 0x7FC0u));
}

NVFP4_FN uint16_t half_of(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
  const float magnitude = absolute(x);
  const uint32_t bits = bits_of(magnitude);
  const uint32_t normal = ((bits + 0xFFFu + ((bits >> 13) & 1u)) >> 13) - (112u << 10);
  // Below 2^-14 the step is 2^-24, the spacing of floats at 1/2: the addition rounds.
  const uint32_t subnormal = bits_of(add(magnitude, 0.5f)) & 0x7FFu;
  const uint32_t finite = select(magnitude < 0.00006103515625f, subnormal, normal);
  const uint32_t rounded = select(magnitude < 65520.0f, finite, 0x7C00u);
  return static_cast<uint16_t>(sign | select(x == x, rounded, 0x7E00u));
}

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMagnitude = 0x7FFFu, kInfinity = 0x7F80u;
  NVFP4_FN float load(uint32_t bits) { return float_of_bfloat16(bits); }
  NVFP4_FN uint16_t store(float x) { return bfloat16_of(x); }
};
struct Half {
  using Storage = uint16_t;
  static constexpr uint32_t kMagnitude = 0x7FFFu, kInfinity = 0x7C00u;
  NVFP4_FN float load(uint32_t bits) { return float_of_half(bits); }
  NVFP4_FN uint16_t store(float x) { return half_of(x); }
};
struct Float {
  using Storage = uint32_t;
  static constexpr uint32_t kMagnitude = 0x7FFFFFFFu, kInfinity = 0x7F800000u;
  NVFP4_FN float load(uint32_t bits) { return float_of(bits); }
  NVFP4_FN uint32_t store(float x) { return bits_of(x); }
};

// Magnitudes order like their bits, and integers vectorise without leave to reorder FP operations.
template <class Type>
NVFP4_FN float amax_of(const typename Type::Storage* x, int64_t num) {
  using Storage = typename Type::Storage;
  Storage amax = 0;
  for (int64_t i = 0; i < num; ++i) {
    const Storage bits = static_cast<Storage>(x[i] & Type::kMagnitude);
    const Storage number = static_cast<Storage>(bits & (0u - (bits <= Type::kInfinity)));
    amax = amax < number ? number : amax;
  }
  return Type::load(amax);
}

float amax(const void* x, InputType type, int64_t num) {
  switch (type) {
    case InputType::kBFloat16:
      return amax_of<BFloat16>(static_cast<const uint16_t*>(x), num);
    case InputType::kHalf:
      return amax_of<Half>(static_cast<const uint16_t*>(x), num);
    default:
      return amax_of<Float>(static_cast<const uint32_t*>(x), num);
  }
}

// kLanes blocks of 16 elements with the block as the inner index: every step of the format then is
// one operation over the lanes, also the maximum and the sums within a block.
struct alignas(64) Tile {
  float x[kBlock][kLanes];
};

template <class Type>
NVFP4_FN void load_pairs(const uint8_t* x, Tile& tile) {
  alignas(64) uint32_t pairs[8][kLanes];
  for (int lane = 0; lane < kLanes; lane += 8) transpose8(x + lane * 32, 32, &pairs[0][lane]);
  for (int j = 0; j < 8; ++j) {
    for (int lane = 0; lane < kLanes; ++lane) {
      tile.x[2 * j][lane] = Type::load(pairs[j][lane] & 0xFFFFu);
      tile.x[2 * j + 1][lane] = Type::load(pairs[j][lane] >> 16);
    }
  }
}

NVFP4_FN void load_floats(const uint8_t* x, Tile& tile) {
  alignas(64) uint32_t words[kBlock][kLanes];
  for (int lane = 0; lane < kLanes; lane += 8) {
    transpose8(x + lane * 64, 64, &words[0][lane]);
    transpose8(x + lane * 64 + 32, 64, &words[8][lane]);
  }
  std::memcpy(tile.x, words, sizeof words);
}

NVFP4_FN int64_t size_of(InputType type) { return type == InputType::kFloat ? 4 : 2; }

// `count` blocks from byte address x; the lanes behind them get zeros.
NVFP4_FN void load_tile(const uint8_t* x, InputType type, int count, Tile& tile) {
  alignas(64) uint8_t padded[kLanes * kBlock * 4];
  if (count < kLanes) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, x, count * kBlock * size_of(type));
    x = padded;
  }
  if (type == InputType::kBFloat16) {
    load_pairs<BFloat16>(x, tile);
  } else if (type == InputType::kHalf) {
    load_pairs<Half>(x, tile);
  } else {
    load_floats(x, tile);
  }
}

// What the blocks of a matrix share, and what four-over-six measures.
struct Outer {
  float amax, s_enc, s_dec, divisor;
};

template <FourOverSix metric, bool fast>
struct Error {
  NVFP4_FN float term(float scaled, float x, const Outer& outer) {
    const float difference = fast ? fast_difference(scaled, x, outer.s_enc)
                                  : strict_difference(scaled, x, outer.amax, outer.divisor);
    return error_term(difference, metric);
  }
};

struct alignas(64) Scales {
  uint32_t code[kLanes];
  float value[kLanes], multiplier[kLanes];
};

// Codes of every block under one choice of scales: positions 0..7 and 8..15 as they lie in memory.
struct alignas(64) Codes {
  uint32_t low[kLanes], high[kLanes];
  float error[kLanes];
};

NVFP4_FN void finish_scales(Scales& scales, const Outer& outer) {
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.value[lane] = decode_e4m3(scales.code[lane]);
    scales.multiplier[lane] = block_multiplier(scales.value[lane], outer.s_dec);
  }
}

NVFP4_FN void encode_tile(const Tile& tile, const Scales& scales, Codes& codes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t words[2] = {0, 0};
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t code = encode_e2m1(multiply(tile.x[i][lane], scales.multiplier[lane]));
      words[i / 8] |= code << (4 * (i % 8));
    }
    codes.low[lane] = words[0];
    codes.high[lane] = words[1];
  }
}

// Random words of one block a lane; blocks lie `stride` groups of eight elements apart.
struct alignas(64) RandomTile {
  uint32_t words[2][4][kLanes];
};

NVFP4_FN void draw_tile(uint64_t first_group, uint64_t stride, const RandomKey& key,
                        RandomTile& tile) {
  for (int half = 0; half < 2; ++half) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t words[4];
      random_words(first_group + stride * static_cast<uint64_t>(lane) + half, key, words);
      for (int i = 0; i < 4; ++i) tile.words[half][i][lane] = words[i];
    }
  }
}

// encode_tile by stochastic rounding.
NVFP4_FN void encode_tile_stochastic(const Tile& tile, const Scales& scales,
                                     const RandomTile& random, Codes& codes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t words[2] = {0, 0};
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t bits = random.words[i / 8][i % 8 / 2][lane] >> (16 * (i % 2)) & 0xFFFFu;
      const float scaled = multiply(tile.x[i][lane], scales.multiplier[lane]);
      words[i / 8] |= encode_e2m1_stochastic(scaled, bits) << (4 * (i % 8));
    }
    codes.low[lane] = words[0];
    codes.high[lane] = words[1];
  }
}

// encode_tile, and the error of every block.
template <class Error>
NVFP4_FN void try_tile(const Tile& tile, const Scales& scales, const Outer& outer, Codes& codes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t words[2] = {0, 0};
    float error = 0.0f;
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) {
      const float x = tile.x[i][lane];
      const uint32_t code = encode_e2m1(multiply(x, scales.multiplier[lane]));
      words[i / 8] |= code << (4 * (i % 8));
      error = add(error, Error::term(code_times_scale(code, scales.value[lane]), x, outer));
    }
    codes.low[lane] = words[0];
    codes.high[lane] = words[1];
    codes.error[lane] = error;
  }
}

NVFP4_FN void store_codes(const Codes& codes, int count, uint8_t* out) {
  alignas(64) uint32_t words[kLanes][2];
  for (int lane = 0; lane < kLanes; ++lane) {
    words[lane][0] = codes.low[lane];
    words[lane][1] = codes.high[lane];
  }
  std::memcpy(out, words, count * sizeof words[0]);
}

NVFP4_FN void store_scales(const Scales& scales, int count, uint8_t* out) {
  alignas(64) uint8_t bytes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) bytes[lane] = static_cast<uint8_t>(scales.code[lane]);
  std::memcpy(out, bytes, count);
}

// Up to kLanes blocks side by side in each of up to 16 rows that share their scales.
struct Strip {
  const QuantizeArgs& args;
  int64_t first_row, first_block;
  int num_rows, count;
};

NVFP4_FN void load_row(const Strip& strip, int row, Tile& tile) {
  const int64_t first = (strip.first_row + row) * strip.args.num_cols + strip.first_block * kBlock;
  const uint8_t* x = static_cast<const uint8_t*>(strip.args.x);
  load_tile(x + first * size_of(strip.args.type), strip.args.type, strip.count, tile);
}

NVFP4_FN void store_row(const Strip& strip, int row, const Codes& codes, const Scales& scales) {
  const int64_t num_blocks = strip.args.num_cols / kBlock;
  const int64_t first = (strip.first_row + row) * num_blocks + strip.first_block;
  store_codes(codes, strip.count, strip.args.codes + first * (kBlock / 2));
  store_scales(scales, strip.count, strip.args.block_scales + first);
}

// max |x| of every block or tile; leaves the last row in `tile`.
NVFP4_FN void strip_amax(const Strip& strip, Tile& tile, float (&block_amax)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) block_amax[lane] = 0.0f;
  for (int row = 0; row < strip.num_rows; ++row) {
    load_row(strip, row, tile);
    for (int lane = 0; lane < kLanes; ++lane) {
      float amax = block_amax[lane];
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) amax = max_magnitude(amax, tile.x[i][lane]);
      block_amax[lane] = amax;
    }
  }
}

void quantize_strip(const Strip& strip, const Outer& outer) {
  Tile tile;
  Scales scales;
  Codes codes;
  alignas(64) float block_amax[kLanes];
  strip_amax(strip, tile, block_amax);
  for (int lane = 0; lane < kLanes; ++lane) {
    scales.code[lane] = block_scale(block_amax[lane], outer.s_enc);
  }
  finish_scales(scales, outer);
  for (int row = 0; row < strip.num_rows; ++row) {
    if (strip.num_rows > 1) load_row(strip, row, tile);
    if (strip.args.stochastic) {
      const int64_t first = (strip.first_row + row) * strip.args.num_cols / 8;
      RandomTile random;
      draw_tile(static_cast<uint64_t>(first + strip.first_block * 2), 2, strip.args.key, random);
      encode_tile_stochastic(tile, scales, random, codes);
    } else {
      encode_tile(tile, scales, codes);
    }
    store_row(strip, row, codes, scales);
  }
}

// Sums the rows' errors into one per tile; a single row keeps its own.
NVFP4_FN void sum_errors(const Codes* rows, int num_rows, float (&error)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    float values[kBlock] = {};
    for (int row = 0; row < num_rows; ++row) values[row] = rows[row].error[lane];
    error[lane] = num_rows > 1 ? tree_sum(values) : values[0];
  }
}

template <class Error>
void quantize_strip_four_over_six(const Strip& strip, const Outer& outer) {
  Tile tile;
  Scales six, four;
  Codes by_six[kBlock], by_four[kBlock];
  alignas(64) float block_amax[kLanes], error_six[kLanes], error_four[kLanes];
  strip_amax(strip, tile, block_amax);
  for (int lane = 0; lane < kLanes; ++lane) {
    const float base = four_over_six_base(block_amax[lane], outer.s_enc);
    six.code[lane] = scale_by_six(base);
    four.code[lane] = scale_by_four(base);
  }
  finish_scales(six, outer);
  finish_scales(four, outer);
  for (int row = 0; row < strip.num_rows; ++row) {
    if (strip.num_rows > 1) load_row(strip, row, tile);
    try_tile<Error>(tile, six, outer, by_six[row]);
    try_tile<Error>(tile, four, outer, by_four[row]);
  }
  sum_errors(by_six, strip.num_rows, error_six);
  sum_errors(by_four, strip.num_rows, error_four);
  for (int lane = 0; lane < kLanes; ++lane) {
    six.code[lane] = select(error_four[lane] < error_six[lane], four.code[lane], six.code[lane]);
  }
  for (int row = 0; row < strip.num_rows; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool take_four = error_four[lane] < error_six[lane];
      by_six[row].low[lane] = select(take_four, by_four[row].low[lane], by_six[row].low[lane]);
      by_six[row].high[lane] = select(take_four, by_four[row].high[lane], by_six[row].high[lane]);
    }
    store_row(strip, row, by_six[row], six);
  }
}

using StripFunction = void (*)(const Strip&, const Outer&);

StripFunction strip_function(const QuantizeArgs& args) {
  if (args.four_over_six == FourOverSix::kOff) return quantize_strip;
  if (args.four_over_six == FourOverSix::kMae) {
    return args.fast_error ? quantize_strip_four_over_six<Error<FourOverSix::kMae, true>>
                           : quantize_strip_four_over_six<Error<FourOverSix::kMae, false>>;
  }
  return args.fast_error ? quantize_strip_four_over_six<Error<FourOverSix::kMse, true>>
                         : quantize_strip_four_over_six<Error<FourOverSix::kMse, false>>;
}

void quantize(const QuantizeArgs& args, int64_t first_row, int num_rows, float amax) {
  Outer outer;
  outer.amax = amax;
  outer.s_enc = encode_scale(amax, args.e4m3_max);
  outer.s_dec = decode_scale(outer.s_enc);
  outer.divisor = kE2m1Max * static_cast<float>(args.e4m3_max);
  const StripFunction quantize_one = strip_function(args);
  const int64_t num_blocks = args.num_cols / kBlock;
  for (int64_t block = 0; block < num_blocks; block += kLanes) {
    const int64_t left = num_blocks - block;
    const int count = left < kLanes ? static_cast<int>(left) : kLanes;
    quantize_one(Strip{args, first_row, block, num_rows, count}, outer);
  }
}

template <class Type>
NVFP4_FN void dequantize_row(const uint8_t* codes, const uint8_t* block_scales, int64_t num_blocks,
                             float outer, typename Type::Storage* out) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float scale = decode_e4m3(block_scales[block]);
    uint32_t words[2];
    std::memcpy(words, codes + block * 8, sizeof words);
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t code = (words[i / 8] >> (4 * (i % 8))) & 0xFu;
      out[block * kBlock + i] = Type::store(multiply(code_times_scale(code, scale), outer));
    }
  }
}

void dequantize(const uint8_t* codes, const uint8_t* block_scales, int64_t num_cols, float scale,
                InputType type, void* out) {
  const int64_t num_blocks = num_cols / kBlock;
  switch (type) {
    case InputType::kBFloat16:
      return dequantize_row<BFloat16>(codes, block_scales, num_blocks, scale,
                                      static_cast<uint16_t*>(out));
    case InputType::kHalf:
      return dequantize_row<Half>(codes, block_scales, num_blocks, scale,
                                  static_cast<uint16_t*>(out));
    default:
      return dequantize_row<Float>(codes, block_scales, num_blocks, scale,
                                   static_cast<uint32_t*>(out));
  }
}

template <class Type>
NVFP4_FN void quantize_mxfp8_blocks(const typename Type::Storage* x, int64_t num_blocks,
                                    uint8_t* codes, uint8_t* block_scales) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    const typename Type::Storage* from = x + block * kMxfp8Block;
    const uint32_t e = mxfp8_block_scale(amax_of<Type>(from, kMxfp8Block));
    const float multiplier = mxfp8_block_multiplier(e);
    block_scales[block] = static_cast<uint8_t>(e);
    for (int i = 0; i < kMxfp8Block; ++i) {
      const uint32_t code = encode_e4m3(multiply(Type::load(from[i]), multiplier));
      codes[block * kMxfp8Block + i] = static_cast<uint8_t>(code);
    }
  }
}

void quantize_mxfp8(const void* x, InputType type, int64_t num_blocks, uint8_t* codes,
                    uint8_t* block_scales) {
  switch (type) {
    case InputType::kBFloat16:
      return quantize_mxfp8_blocks<BFloat16>(static_cast<const uint16_t*>(x), num_blocks, codes,
                                             block_scales);
    case InputType::kHalf:
      return quantize_mxfp8_blocks<Half>(static_cast<const uint16_t*>(x), num_blocks, codes,
                                         block_scales);
    default:
      return quantize_mxfp8_blocks<Float>(static_cast<const uint32_t*>(x), num_blocks, codes,
                                          block_scales);
  }
}

template <class Type>
NVFP4_FN void dequantize_mxfp8_blocks(const uint8_t* codes, const uint8_t* block_scales,
                                      int64_t num_blocks, typename Type::Storage* out) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    const uint32_t e = block_scales[block];
    for (int i = 0; i < kMxfp8Block; ++i) {
      const float q = decode_e4m3(codes[block * kMxfp8Block + i]);
      out[block * kMxfp8Block + i] = Type::store(mxfp8_decode(q, e));
    }
  }
}

void dequantize_mxfp8(const uint8_t* codes, const uint8_t* block_scales, int64_t num_blocks,
                      InputType type, void* out) {
  switch (type) {
    case InputType::kBFloat16:
      return dequantize_mxfp8_blocks<BFloat16>(codes, block_scales, num_blocks,
                                               static_cast<uint16_t*>(out));
    case InputType::kHalf:
      return dequantize_mxfp8_blocks<Half>(codes, block_scales, num_blocks,
                                           static_cast<uint16_t*>(out));
    default:
      return dequantize_mxfp8_blocks<Float>(codes, block_scales, num_blocks,
                                            static_cast<uint32_t*>(out));
  }
}
