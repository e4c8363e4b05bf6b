// Four float lanes in plain C++ with vector extensions: builds anywhere gcc or clang does. Inside an anonymous namespace.
constexpr int W = 4;
constexpr int kMaxBatch = 4;
constexpr int kAccumulators = 8;
constexpr bool kPairs = false;
typedef float V __attribute__((vector_size(16)));

inline V zero() { return V{0, 0, 0, 0}; }
inline V broadcast(float a) { return V{a, a, a, a}; }
inline V load(const float* p) { V a; std::memcpy(&a, p, sizeof a); return a; }
inline void store(float* p, V a) { std::memcpy(p, &a, sizeof a); }
inline V add(V a, V b) { return a + b; }
inline V mul(V a, V b) { return a * b; }
inline V fma(V a, V b, V c) { return a * b + c; }
inline float sum(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline V sum_each(const V* a) { return V{sum(a[0]), sum(a[1]), sum(a[2]), sum(a[3])}; }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline float f16(uint16_t v) {
  uint32_t sign = (v & 0x8000u) << 16, exponent = (v >> 10) & 31, fraction = v & 0x3ffu;
  if (exponent == 31) return as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
  float subnormal = fraction * (1.0f / (1 << 24));
  return sign ? -subnormal : subnormal;
}
inline V load_bf16(const uint16_t* p) { V a; for (int i = 0; i < W; ++i) a[i] = as_float(uint32_t{p[i]} << 16); return a; }
inline V load_f16(const uint16_t* p) { return V{f16(p[0]), f16(p[1]), f16(p[2]), f16(p[3])}; }

// The first count < W of them, and zeros; nothing past them is read.
inline V load_part(bool f16, const uint16_t* p, int count) {
  uint16_t part[W] = {};
  std::memcpy(part, p, count * sizeof(uint16_t));
  return f16 ? load_f16(part) : load_bf16(part);
}

inline void decode_bf16(const uint16_t* p, V* out) {
  for (int i = 0; i < kBlock / W; ++i) out[i] = load_bf16(p + W * i);
}
inline void decode_q8(const int8_t* p, float scale, V* out) {
  for (int i = 0; i < kBlock; ++i) out[i / W][i % W] = p[i] * scale;
}
inline void decode_q4(const uint8_t* p, float scale, float min, V* out) {
  for (int i = 0; i < 16; ++i) {
    out[i / W][i % W] = (p[i] & 15) * scale + min;
    out[4 + i / W][i % W] = (p[i] >> 4) * scale + min;
  }
}
