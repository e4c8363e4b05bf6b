// Eight float lanes on AVX2 with FMA and F16C. Included inside an anonymous namespace.
constexpr int W = 8;
constexpr int kMaxBatch = 4;
constexpr int kAccumulators = 8;
constexpr bool kPairs = true;
using V = __m256;

inline V zero() { return _mm256_setzero_ps(); }
inline V broadcast(float a) { return _mm256_set1_ps(a); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V a) { _mm256_storeu_ps(p, a); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(V a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline V sum_each(const V* a) {
  const V low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const V high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline V load_bf16(const uint16_t* p) {
  __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
}
inline V load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// The first count < W of them, and zeros; nothing past them is read.
inline V load_part(bool f16, const uint16_t* p, int count) {
  uint16_t part[W] = {};
  std::memcpy(part, p, count * sizeof(uint16_t));
  return f16 ? load_f16(part) : load_bf16(part);
}

inline void decode_bf16(const uint16_t* p, V* out) {
  for (int i = 0; i < 2; ++i) {
    __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
    out[2 * i] = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    out[2 * i + 1] = _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff0000)));
  }
}

inline void decode_q8(const int8_t* p, float scale, V* out) {
  for (int i = 0; i < 4; ++i) {
    __m256i a = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
    out[i] = mul(_mm256_cvtepi32_ps(a), broadcast(scale));
  }
}

inline void decode_q4(const uint8_t* p, float scale, float min, V* out) {
  const __m256i low = _mm256_set1_epi32(15);
  for (int i = 0; i < 2; ++i) {
    __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
    out[i] = fma(_mm256_cvtepi32_ps(_mm256_and_si256(q, low)), broadcast(scale), broadcast(min));
    out[i + 2] = fma(_mm256_cvtepi32_ps(_mm256_srli_epi32(q, 4)), broadcast(scale), broadcast(min));
  }
}
