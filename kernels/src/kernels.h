// What the handlers hand to the kernels, and the table of kernels one instruction set provides.
#pragma once
#include <cstdint>

namespace jaxlm {

enum class Type : int { kF32, kBF16, kF16 };
enum class Format : int { kF32, kBF16, kF16, kQ8, kQ4 };

constexpr int kBlock = 32;  // weights are decoded 32 at a time; also the finest scale group

// x as integers in blocks of 32, in the order the integer kernels read (see vnni.inc.h).
struct QuantX {
  int pieces = 1;                // bytes per integer: 1, or 3 for results as exact as float32's
  const char* stream = nullptr;  // bytes, scales and corrections
  const float* sums = nullptr;   // [B, blocks rounded up to 16]: sum of x over each block
};

// y[b, n] = sum_k x[b, k] * W[n, k] for one matrix.
struct MatJob {
  Format format = Format::kF32;
  Type scale_type = Type::kF32;
  int group_shift = 0;  // log2(scale group / 32)
  int64_t B = 0, N = 0, K = 0;
  const void* w = nullptr;       // [N, K] in its stored form
  const void* scale = nullptr;   // [N, K / group]
  const void* min = nullptr;     // [N, K / group], or null: 4-bit values are then scale * (q - 8)
  const float* x = nullptr;      // as pack_x left it
  const QuantX* xq = nullptr;    // set: use the integer kernels
  float* y = nullptr;            // [B, N]
};

struct AttnJob {
  Type cache_type = Type::kF32;
  int64_t B = 0, S = 0, K = 0, H = 0, h = 0;
  float softcap = 0;             // 0: off
  const float* q = nullptr;      // [B, H, h], already scaled
  const float* k_new = nullptr;  // [B, K, h]
  const float* v_new = nullptr;
  const float* sinks = nullptr;  // [H] or null
  const void* k = nullptr;       // [B, S, K, h]
  const void* v = nullptr;
  float* out = nullptr;          // [B, H, h]
};

// Floats one attend() call needs for its unnormalised result: per query head the running maximum, the sum, and h values.
inline int64_t part_floats(const AttnJob& a) { return a.H * (a.h + 2); }

constexpr int kSlots = 64;  // slots per softmax update
constexpr int kQuad = 4;    // slots read together
inline int64_t scratch_floats(const AttnJob& a) { return a.H * kSlots + kQuad * a.K * a.h; }

struct Kernels {
  const char* name;
  void (*to_float)(Type type, const void* data, int64_t count, float* out);
  // x [B, K] -> B * round_up(K, 32) floats in the order the kernels read: [pass, block, row, 32].
  void (*pack_x)(Format format, const float* x, int64_t B, int64_t K, float* out);
  void (*matvec)(const MatJob& job, int64_t n0, int64_t n1);  // rows [n0, n1) of W
  // The integer kernels, for 8 and 4 bits: null where the instruction set has no integer dot product.
  int64_t (*quantized_bytes)(Format format, int64_t B, int64_t K, int pieces);
  void (*quantize_x)(Format format, const float* x, int64_t B, int64_t K, int pieces, char* stream, float* sums);
  void (*matvec_int)(const MatJob& job, int64_t n0, int64_t n1);
  // Positions [p0, p1) of row b (slot = position mod S) -> part; merge adds the new token, sinks and normalises.
  void (*attend)(const AttnJob& job, int64_t b, int64_t p0, int64_t p1, float* part, float* scratch);
  void (*attend_merge)(const AttnJob& job, int64_t b, const float* parts, int64_t count);
  float (*read)(const float* p, int64_t count);  // touches every value; for the bandwidth probe
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null when not compiled in
const Kernels* avx512_kernels();  // null when not compiled in
const Kernels& kernels();         // the best one this machine runs; JAXLM_CPU_ISA=portable|avx2|avx512 asks for another

}  // namespace jaxlm
