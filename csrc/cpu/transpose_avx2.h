// transpose8 for x86, see kernels_impl.h: 24 shuffles for 64 words. Included like kernels_impl.h.

NVFP4_FN void transpose8(const uint8_t* rows, int row_bytes, uint32_t* out) {
  __m256i r[8], t[8];
  for (int l = 0; l < 8; ++l) {
    r[l] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + l * row_bytes));
  }
  // Within 128-bit halves: words of row pairs, then of row fours.
  for (int l = 0; l < 8; l += 2) {
    t[l] = _mm256_unpacklo_epi32(r[l], r[l + 1]);
    t[l + 1] = _mm256_unpackhi_epi32(r[l], r[l + 1]);
  }
  for (int l = 0; l < 8; l += 4) {
    r[l] = _mm256_unpacklo_epi64(t[l], t[l + 2]);
    r[l + 1] = _mm256_unpackhi_epi64(t[l], t[l + 2]);
    r[l + 2] = _mm256_unpacklo_epi64(t[l + 1], t[l + 3]);
    r[l + 3] = _mm256_unpackhi_epi64(t[l + 1], t[l + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m256i low = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
    const __m256i high = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + j * kLanes), low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + (j + 4) * kLanes), high);
  }
}
