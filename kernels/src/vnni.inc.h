// Products with activations quantised to int8 in blocks of 32 (VNNI). Faster than float32 arithmetic, equal to it only up
// to the rounding of x: relative error of each block of x about 1/254 of its largest value.
//
// One 64-byte read of weights covers two blocks of 8-bit or four of 4-bit values; sixteen int32 sums are the lanes.
// 8 bit: the dot product takes unsigned values, so weights are read as q + 128 and aux takes 128 * sum(x) off again.

template <bool kFour>
struct IntRow {
  static constexpr int kBlocks = kFour ? 4 : 2;  // blocks per read
  static __m512i expand_index() {
    return kFour ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                 : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  }
};

// Scales of `count` blocks (groups wider than a block repeat theirs), zero up to a multiple of 16.
inline void block_numbers(const MatJob& job, const void* data, int64_t group0, int count, float* out) {
  float groups[kSegment + W];
  const int numbers = ((count - 1) >> job.group_shift) + 1;
  load_numbers(job.scale_type, data, group0, numbers, groups);
  for (int i = 0; i < count; ++i) out[i] = groups[i >> job.group_shift];
  for (int i = count; i < count + W && i < kSegment + W; ++i) out[i] = 0;
}

template <bool kFour, int NB>
void int_rows(const MatJob& job, int64_t b0, int64_t n0, int64_t n1) {
  constexpr int R = IntRow<kFour>::kBlocks, kBytes = 64 / R;
  const QuantX& x = *job.xq;
  const int64_t blocks = job.K / kBlock, groups = blocks >> job.group_shift;
  const __m512i index = IntRow<kFour>::expand_index(), nibble = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
  const int8_t* xq = x.q + b0 * x.blocks * kBlock;
  const float* lanes = x.lanes + b0 * (x.blocks / R) * 16;
  const float* aux = x.aux + b0 * x.blocks;
  for (int64_t n = n0; n < n1; ++n) {
    const char* w = static_cast<const char*>(job.w) + n * blocks * kBytes;
    V acc[NB];
    for (V& a : acc) a = zero();
    for (int64_t i0 = 0; i0 < blocks; i0 += kSegment) {
      const int count = static_cast<int>(blocks - i0 < kSegment ? blocks - i0 : kSegment);
      const int64_t group0 = n * groups + (i0 >> job.group_shift);
      float scale[kSegment + W], min[kSegment + W];
      block_numbers(job, job.scale, group0, count, scale);
      if (kFour && job.min) block_numbers(job, job.min, group0, count, min);
      for (int i = 0; i < count; i += W) {
        V side = !kFour ? load(scale + i) : job.min ? load(min + i) : mul(load(scale + i), broadcast(-8.0f));
        for (int b = 0; b < NB; ++b) acc[b] = fma(side, load(aux + b * x.blocks + i0 + i), acc[b]);
      }
      for (int i = 0; i < count; i += R) {
        const char* p = w + (i0 + i) * kBytes;
        const int have = (count - i < R ? count - i : R) * kBytes;
        prefetch(p + kPrefetch);
        const __m512i raw = have == 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((1ull << have) - 1, p);
        const V s = _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(scale + i)));
        const __m512i u = kFour ? _mm512_and_si512(raw, nibble) : _mm512_xor_si512(raw, flip);
        const __m512i u2 = _mm512_and_si512(_mm512_srli_epi32(raw, 4), nibble);
        for (int b = 0; b < NB; ++b) {
          const int8_t* xb = xq + (b * x.blocks + i0 + i) * kBlock;
          __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_loadu_si512(xb));
          if (kFour) dot = _mm512_dpbusd_epi32(dot, u2, _mm512_loadu_si512(xb + 64));
          const float* xs = lanes + ((b * x.blocks + i0 + i) / R) * 16;
          acc[b] = fma(_mm512_cvtepi32_ps(dot), mul(s, load(xs)), acc[b]);
        }
      }
    }
    for (int b = 0; b < NB; ++b) job.y[(b0 + b) * job.N + n] = sum(acc[b]);
  }
}

template <bool kFour>
void int_batch(const MatJob& job, int64_t b, int64_t count, int64_t n0, int64_t n1) {
  switch (count) {
    case 1: return int_rows<kFour, 1>(job, b, n0, n1);
    case 2: return int_rows<kFour, 2>(job, b, n0, n1);
    case 3: return int_rows<kFour, 3>(job, b, n0, n1);
    case 4: return int_rows<kFour, 4>(job, b, n0, n1);
    case 5: return int_rows<kFour, 5>(job, b, n0, n1);
    case 6: return int_rows<kFour, 6>(job, b, n0, n1);
    case 7: return int_rows<kFour, 7>(job, b, n0, n1);
    case 8: return int_rows<kFour, 8>(job, b, n0, n1);
  }
}

void matvec_int8(const MatJob& job, int64_t n0, int64_t n1) {
  const int64_t passes = (job.B + kMaxBatch - 1) / kMaxBatch, step = passes > 1 ? 8 : n1 - n0;
  for (int64_t n = n0; n < n1; n += step) {
    const int64_t end = n + step < n1 ? n + step : n1;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t b = job.B * pass / passes, count = job.B * (pass + 1) / passes - b;
      if (job.format == Format::kQ4) int_batch<true>(job, b, count, n, end);
      else int_batch<false>(job, b, count, n, end);
    }
  }
}

// Where element e of a row goes in the 4-bit order: of every four blocks first all low halves, then all high halves.
inline int64_t q4_place(int64_t e) { return e / 128 * 128 + e % 32 / 16 * 64 + e % 128 / 32 * 16 + e % 16; }

void quantize_x(Format format, const float* x, int64_t B, int64_t K, int8_t* q, float* lanes, float* aux) {
  const bool four = format == Format::kQ4;
  const int64_t used = K / kBlock, blocks = (used + 15) / 16 * 16, width = four ? 4 : 8;
  std::memset(q, 0, B * blocks * kBlock);
  std::memset(lanes, 0, B * blocks * width * sizeof(float));
  std::memset(aux, 0, B * blocks * sizeof(float));
  for (int64_t b = 0; b < B; ++b) {
    int8_t* row = q + b * blocks * kBlock;
    for (int64_t i = 0; i < used; ++i) {
      const V x0 = load(x + b * K + i * kBlock), x1 = load(x + b * K + i * kBlock + W);
      const float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
      const float scale = top / 127, inverse = scale > 0 ? 1 / scale : 0;
      const __m512i q0 = _mm512_cvtps_epi32(mul(x0, broadcast(inverse))), q1 = _mm512_cvtps_epi32(mul(x1, broadcast(inverse)));
      const int64_t e = i * kBlock;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + (four ? q4_place(e) : e)), _mm512_cvtsepi32_epi8(q0));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + (four ? q4_place(e + 16) : e + 16)), _mm512_cvtsepi32_epi8(q1));
      for (int64_t j = 0; j < width; ++j) lanes[(b * blocks + i) * width + j] = scale;
      aux[b * blocks + i] = four ? sum(add(x0, x1)) : -128 * scale * _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
    }
  }
}
