// Products in integer arithmetic (VNNI): x becomes integers, block by block of 32, and so does the bulk of the work.
//
// x = scale * integer per block. The integer is one signed byte ("int8": |integer| <= 127, rounding of 1/254 of the
// block's largest value) or three, most significant first ("exact": |integer| <= 2^22, rounding as in float32). A sum
// over the bytes of one piece is one dot-product instruction, pieces are joined by shifts, and the int32 total cannot
// overflow: 4 products of at most 127 * 2^22 per lane for 8-bit weights, 8 of at most 15 * 2^22 for 4-bit ones.
//
// One 64-byte read of weights ("step") covers two blocks of 8-bit or four of 4-bit values. The dot product takes
// unsigned weights: 8-bit ones are read as q + 128 and a stored correction takes 128 * sum(x) off again, modulo 2^32.
// What a step needs of a row of x lies together: [pieces, 1 or 2, 64] bytes, 16 scales, and for 8 bit 16 corrections;
// the rows of one pass (split_rows) lie side by side within a step.

template <bool kFour>
constexpr int step_blocks() { return kFour ? 4 : 2; }
constexpr int64_t unit_bytes(bool four, int pieces) { return 64 * (four ? 2 * pieces + 1 : pieces + 2); }

template <bool kFour>
inline __m512i load_weights(const char* p, int blocks) {
  constexpr int R = step_blocks<kFour>();
  if (blocks >= R) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi8((1ull << blocks * (64 / R)) - 1, p);
}

template <bool kFour, int P, int NB>
void int_rows(const MatJob& job, int64_t b0, int64_t n0, int64_t n1) {
  constexpr int R = step_blocks<kFour>(), kBytes = 64 / R, kUnit = unit_bytes(kFour, P), kHalves = kFour ? 2 : 1;
  const int64_t blocks = job.K / kBlock, groups = blocks >> job.group_shift, padded = (blocks + W - 1) / W * W;
  const __m512i index = kFour ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                              : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i nibble = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
  const float* sums = job.xq->sums + b0 * padded;
  V sums_of[NB][W];  // of up to W rows of weights, whose lanes are summed together
  for (int64_t n = n0; n < n1; ++n) {
    const char *w = static_cast<const char*>(job.w) + n * blocks * kBytes;
    const char *x = job.xq->stream + b0 * (padded / R) * kUnit;
    V acc[NB];
    for (V& a : acc) a = zero();
    for (int64_t i0 = 0; i0 < blocks; i0 += kSegment) {
      const int count = static_cast<int>(blocks - i0 < kSegment ? blocks - i0 : kSegment);
      const int64_t group0 = n * groups + (i0 >> job.group_shift);
      float scale[kSegment + W], min[kSegment + W];
      expand_numbers(job, job.scale, group0, count, scale);
      if (kFour && job.min) expand_numbers(job, job.min, group0, count, min);
      for (int i = 0; kFour && i < count; i += W) {
        const V m = job.min ? load(min + i) : mul(load(scale + i), broadcast(-8.0f));
        for (int b = 0; b < NB; ++b) acc[b] = fma(m, load(sums + b * padded + i0 + i), acc[b]);
      }
      for (int i = 0; i < count; i += R, w += 64) {
        prefetch(w + kPrefetch);
        const __m512i raw = load_weights<kFour>(w, count - i);
        const V s = _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(scale + i)));
        const __m512i u0 = kFour ? _mm512_and_si512(raw, nibble) : _mm512_xor_si512(raw, flip);
        const __m512i u1 = _mm512_and_si512(_mm512_srli_epi32(raw, 4), nibble);
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b, x += kUnit) {
          __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 3
          for (int piece = 0; piece < P; ++piece) {
            if (piece) dot = _mm512_slli_epi32(dot, 8);
            dot = _mm512_dpbusd_epi32(dot, u0, _mm512_load_si512(x + 64 * kHalves * piece));
            if (kFour) dot = _mm512_dpbusd_epi32(dot, u1, _mm512_load_si512(x + 64 * (kHalves * piece + 1)));
          }
          if (!kFour) dot = _mm512_add_epi32(dot, _mm512_load_si512(x + 64 * (P + 1)));
          const V scales = mul(s, load(reinterpret_cast<const float*>(x + 64 * kHalves * P)));
          acc[b] = fma(_mm512_cvtepi32_ps(dot), scales, acc[b]);
        }
      }
    }
    const int64_t held = (n - n0) % W;
    for (int b = 0; b < NB; ++b) sums_of[b][held] = acc[b];
    if (held < W - 1 && n < n1 - 1) continue;
    for (int b = 0; b < NB; ++b) {
      float total[W];
      for (int64_t i = held + 1; i < W; ++i) sums_of[b][i] = zero();
      store(total, sum_each(sums_of[b]));
      std::memcpy(job.y + (b0 + b) * job.N + n - held, total, (held + 1) * sizeof(float));
    }
  }
}

template <bool kFour, int P>
struct IntRows {
  template <int NB>
  static void run(const MatJob& job, int64_t b0, int64_t n0, int64_t n1) { int_rows<kFour, P, NB>(job, b0, n0, n1); }
};

void matvec_int(const MatJob& job, int64_t n0, int64_t n1) {
  const bool four = job.format == Format::kQ4;
  if (job.xq->pieces == 1) return four ? all_rows<IntRows<true, 1>>(job, n0, n1) : all_rows<IntRows<false, 1>>(job, n0, n1);
  return four ? all_rows<IntRows<true, 3>>(job, n0, n1) : all_rows<IntRows<false, 3>>(job, n0, n1);
}

// One block of x: its scale and 32 integers. Not a number anywhere (or an infinity) makes the scale one.
inline float block_integers(const float* x, int pieces, int32_t* out, float* total) {
  const V x0 = load(x), x1 = load(x + W);
  *total = sum(add(x0, x1));
  const float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
  const float limit = pieces == 1 ? 127.0f : 4194304.0f, inverse = top > 1e-30f ? limit / top : 0;
  _mm512_storeu_si512(out, _mm512_cvtps_epi32(mul(x0, broadcast(inverse))));
  _mm512_storeu_si512(out + W, _mm512_cvtps_epi32(mul(x1, broadcast(inverse))));
  return top / limit + (*total - *total);
}

// Places a block's integers as signed base-256 digits, with its scale and correction.
void write_block(char* unit, bool four, int pieces, int64_t i, const int32_t* x, float scale) {
  const int64_t part = i % (four ? 4 : 2);  // which of the step's blocks
  for (int half = 0; half < 2; ++half) {
    char* bytes = unit + part * (four ? 16 : 32) + half * (four ? 64 : 16);
    __m512i rest = _mm512_loadu_si512(x + 16 * half);
    for (int piece = pieces - 1; piece >= 0; --piece) {
      const __m128i digits = _mm512_cvtepi32_epi8(rest);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + piece * (four ? 128 : 64)), digits);
      rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_cvtepi8_epi32(digits)), 8);
    }
  }
  const int lanes = four ? 4 : 8;
  float* scales = reinterpret_cast<float*>(unit + 64 * pieces * (four ? 2 : 1)) + part * lanes;
  for (int j = 0; j < lanes; ++j) scales[j] = scale;
  if (four) return;
  uint32_t* corrections = reinterpret_cast<uint32_t*>(unit + 64 * (pieces + 1)) + part * lanes;
  for (int j = 0; j < lanes; ++j)
    corrections[j] = -128u * static_cast<uint32_t>(x[4 * j] + x[4 * j + 1] + x[4 * j + 2] + x[4 * j + 3]);
}

int64_t quantized_bytes(Format format, int64_t B, int64_t K, int pieces) {
  const bool four = format == Format::kQ4;
  return B * ((K / kBlock + W - 1) / W * W / (four ? 4 : 2)) * unit_bytes(four, pieces);
}

void quantize_x(Format format, const float* x, int64_t B, int64_t K, int pieces, char* stream, float* sums) {
  const bool four = format == Format::kQ4;
  const int64_t blocks = K / kBlock, padded = (blocks + W - 1) / W * W, per_step = four ? 4 : 2, unit = unit_bytes(four, pieces);
  std::memset(stream, 0, quantized_bytes(format, B, K, pieces));
  std::memset(sums, 0, B * padded * sizeof(float));
  for_passes(B, [&](int64_t b0, int64_t rows) {
    for (int64_t i = 0; i < blocks; ++i)
      for (int64_t b = 0; b < rows; ++b) {
        int32_t integers[kBlock];
        const float scale = block_integers(x + (b0 + b) * K + i * kBlock, pieces, integers, sums + (b0 + b) * padded + i);
        char* place = stream + b0 * (padded / per_step) * unit + (i / per_step * rows + b) * unit;
        write_block(place, four, pieces, i, integers, scale);
      }
  });
}
