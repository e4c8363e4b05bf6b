// Sixteen float lanes on AVX-512 (F, BW, VL, DQ). Included inside an anonymous namespace.
constexpr int W = 16;
constexpr int kMaxBatch = 8;        // rows of x per pass
constexpr int kAccumulators = 16;   // registers for sums
constexpr bool kPairs = true;       // bfloat16 decodes to even elements, then odd ones
using V = __m512;

inline V zero() { return _mm512_setzero_ps(); }
inline V broadcast(float a) { return _mm512_set1_ps(a); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(V a) { return _mm512_reduce_add_ps(a); }
// The sums of sixteen vectors: halves are added across pairs, then quarters, then neighbours within quarters.
inline V sum_each(const V* a) {
  V half[8], quarter[4];
  for (int i = 0; i < 8; ++i)
    half[i] = add(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)
    quarter[i] = add(_mm512_shuffle_f32x4(half[i], half[i + 4], 0x88), _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd));
  const V even = add(_mm512_unpacklo_ps(quarter[0], quarter[1]), _mm512_unpackhi_ps(quarter[0], quarter[1]));
  const V odd = add(_mm512_unpacklo_ps(quarter[2], quarter[3]), _mm512_unpackhi_ps(quarter[2], quarter[3]));
  const V all = add(_mm512_shuffle_ps(even, odd, 0x44), _mm512_shuffle_ps(even, odd, 0xee));
  return _mm512_shuffle_f32x4(all, all, 0xd8);
}
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline V load_bf16(const uint16_t* p) {
  __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
}
// The first count < 16 of them, and zeros; nothing past them is read.
inline V load_part(bool f16, const uint16_t* p, int count) {
  const __m256i a = _mm256_maskz_loadu_epi16((1u << count) - 1, p);
  return f16 ? _mm512_cvtph_ps(a) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
inline V load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline void decode_bf16(const uint16_t* p, V* out) {
  __m512i a = _mm512_loadu_si512(p);
  out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  out[1] = _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(0xffff0000)));
}

inline V i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void decode_q8(const int8_t* p, float scale, V* out) {
  V s = broadcast(scale);
  out[0] = mul(i8(p), s);
  out[1] = mul(i8(p + 16), s);
}

// The sixteen possible values of the block are a register; nibbles (the permutation reads four bits only) index it.
inline void decode_q4(const uint8_t* p, float scale, float min, V* out) {
  const V steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  V values = fma(broadcast(scale), steps, broadcast(min));
  __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  out[0] = _mm512_permutexvar_ps(q, values);
  out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values);
}
