// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The bodies of the row kernels, over 16 float32 lanes that each variant provides.
//
// Included once per variant, inside an anonymous namespace: the linker, which merges inline functions, cannot replace one
// variant's code by another's. The include follows all standard headers, so that none of their code is compiled for the variant's
// target. The including file defines Lanes (16 floats; rows may begin at any address) and Line (kLineBytes of a row).
//
// Rows are processed in strips of a few lines, which the compiler unrolls. A loop over single lines would check its end at each
// line, and reload its pointers because a store could have changed them. That is too slow as soon as another thread shares the
// core. Accumulators stay in registers while all rows of a token are added, so each row is read once and the output is written
// once.

constexpr int64_t kLanes = 16;
constexpr int64_t kPrefetchDistanceBytes = 2048;  // of each row: hides the memory's latency and fits the first-level cache
constexpr int64_t kLinesOfOneRow = 4;
constexpr int64_t kLinesOfSomeRows = 2;  // of each: accumulators use registers, and many concurrent prefetches stall

template <typename Element>
constexpr int64_t kLineColumns = kLineBytes / Element::kBytes;
template <typename Element>
constexpr int64_t kLanesOfLine = kLineColumns<Element> / kLanes;

inline const char* byte_at(const void* row, int64_t place) { return static_cast<const char*>(row) + place; }
inline char* byte_at(void* row, int64_t place) { return static_cast<char*>(row) + place; }

template <int64_t kLines>
using Lines = std::integral_constant<int64_t, kLines>;

// Prefetches the strip that is kPrefetchDistanceBytes after a place: of the same rows, or past their end of the next ones. `end`
// is the end of the strips of a row. Always inlined, see prefetch_beginning.
template <int64_t kLines>
__attribute__((always_inline)) inline void prefetch_ahead(const RowList& rows, const RowList& next, int64_t place, int64_t end) {
  const int64_t ahead = place + std::min(kPrefetchDistanceBytes, end);
  const RowList& list = ahead < end ? rows : next;
  for (int64_t i = 0; i < list.count; ++i) {
    const char* strip = byte_at(list.rows[i], ahead < end ? ahead : ahead - end);
    for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(strip + line * kLineBytes, 0, 3);
  }
}

// Calls on_lines(Lines, place) for the strips of kLines lines of a row, then for single lines. Returns the end of the last whole
// line.
template <int64_t kLines, typename OnLines>
__attribute__((always_inline)) inline int64_t for_lines(const RowList& rows, const RowList& next, int64_t row_bytes,
                                                        OnLines on_lines) {
  const int64_t end = row_bytes / (kLines * kLineBytes) * (kLines * kLineBytes);
  int64_t place = 0;
  for (; place < end; place += kLines * kLineBytes) {
    prefetch_ahead<kLines>(rows, next, place, end);
    on_lines(Lines<kLines>(), place);
  }
  for (; place + kLineBytes <= row_bytes; place += kLineBytes) on_lines(Lines<1>(), place);
  return place;
}

template <typename Element>
inline Lanes load_lanes(const char* from, int64_t index) {
  return Lanes::load(Element(), from + index * kLanes * Element::kBytes);
}

// Unpacks a line to Lanes; Line::pack is the inverse. Lanes follow the columns. With bfloat16, Lanes 0 contain the even columns
// and Lanes 1 the odd ones. A shift and a mask then convert a pair to float32 without a shuffle across the register.
template <typename Element>
inline void unpack_line(Element, const char* from, Lanes* lanes) {
  for (int64_t j = 0; j < kLanesOfLine<Element>; ++j) lanes[j] = load_lanes<Element>(from, j);
}
inline void unpack_line(BFloat16, const char* from, Lanes* lanes) { Line::unpack_pairs(from, lanes); }

// The column of a line in lane `lane` of Lanes j.
template <typename Element>
constexpr int64_t column_of(Element, int64_t j, int64_t lane) {
  return j * kLanes + lane;
}
constexpr int64_t column_of(BFloat16, int64_t j, int64_t lane) { return 2 * lane + j; }

// The part of a row after its last whole line.
template <typename Element>
struct Tail {
  const int64_t place;
  const int64_t bytes;
  char padded[kLineBytes] = {};

  Tail(int64_t end_of_lines, int64_t hidden) : place(end_of_lines), bytes(hidden * Element::kBytes - end_of_lines) {}

  // The tail of a row as a whole line padded with zeros; valid until the next call.
  const char* of(const void* row) {
    std::memcpy(padded, byte_at(row, place), bytes);
    return padded;
  }

  void write(const Line& line, void* row) const {
    char whole[kLineBytes];
    line.store(whole);
    std::memcpy(byte_at(row, place), whole, bytes);
  }
};

// A plain store reads the line that it overwrites: prefetches those of the next strip.
template <bool kStreams, int64_t kLines>
__attribute__((always_inline)) inline void prefetch_output(char* strip) {
  for (int64_t line = 0; line < (kStreams ? 0 : kLines); ++line) {
    __builtin_prefetch(strip + (kLines + line) * kLineBytes, 1, 3);
  }
}

template <bool kStreams>
inline void put_line(const Line& line, char* to) {
  kStreams ? line.stream(to) : line.store(to);
}

// The sums of kLines lines of all rows; row_at(i) is their address in row i.
template <typename Element, bool kWeighted, int64_t kLines, typename RowAt>
inline void sum_lines(int64_t count, RowAt row_at, const float* weights, Lanes* sums) {
  constexpr int64_t kCount = kLines * kLanesOfLine<Element>;
  for (int64_t j = 0; j < kCount; ++j) sums[j] = Lanes::splat(-0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const char* row = row_at(i);
    Lanes lanes[kCount];
    for (int64_t line = 0; line < kLines; ++line) {
      unpack_line(Element(), row + line * kLineBytes, lanes + line * kLanesOfLine<Element>);
    }
    if (kWeighted) {
      const Lanes weight = Lanes::splat(weights[i]);
      for (int64_t j = 0; j < kCount; ++j) sums[j] = Lanes::fma(lanes[j], weight, sums[j]);
    } else {
      for (int64_t j = 0; j < kCount; ++j) sums[j] = Lanes::add(sums[j], lanes[j]);
    }
  }
}

template <typename Element, bool kWeighted, bool kStreams>
void sum_strips(const RowList& rows, const RowList& next, const float* weights, int64_t hidden, void* out) {
  constexpr int64_t kLineLanes = kLanesOfLine<Element>;
  const int64_t row_bytes = hidden * Element::kBytes;
  const int64_t end = for_lines<kLinesOfSomeRows>(rows, next, row_bytes, [&](auto lines, int64_t place) {
    Lanes sums[lines * kLineLanes];
    sum_lines<Element, kWeighted, lines>(rows.count, [&](int64_t i) { return byte_at(rows.rows[i], place); }, weights, sums);
    for (int64_t line = 0; line < lines; ++line) {
      put_line<kStreams>(Line::pack(Element(), sums + line * kLineLanes), byte_at(out, place + line * kLineBytes));
    }
  });
  if (end == row_bytes) return;
  Tail<Element> tail(end, hidden);
  Lanes sums[kLineLanes];
  sum_lines<Element, kWeighted, 1>(rows.count, [&](int64_t i) { return tail.of(rows.rows[i]); }, weights, sums);
  tail.write(Line::pack(Element(), sums), out);
}

template <typename Element>
void sum_rows(const RowList& rows, const RowList& next, const float* weights, int64_t hidden, bool streams, void* out) {
  const bool weighted = weights != nullptr;
  const auto sum = weighted ? (streams ? sum_strips<Element, true, true> : sum_strips<Element, true, false>)
                            : (streams ? sum_strips<Element, false, true> : sum_strips<Element, false, false>);
  sum(rows, next, weights, hidden, out);
}

template <typename Element>
inline Line scaled_line(const Lanes* lanes, const Lanes& factor) {
  Lanes scaled[kLanesOfLine<Element>];
  for (int64_t j = 0; j < kLanesOfLine<Element>; ++j) scaled[j] = Lanes::multiply(lanes[j], factor);
  return Line::pack(Element(), scaled);
}

// A strip of the input stays in registers while it is written to all targets.
template <typename Element, bool kStreams>
void scale_lines(const void* in, const RowList& next, const Targets& targets, int64_t hidden) {
  constexpr int64_t kLineLanes = kLanesOfLine<Element>;
  const RowList rows = {&in, 1};
  const int64_t row_bytes = hidden * Element::kBytes;
  const int64_t end = for_lines<kLinesOfOneRow>(rows, next, row_bytes, [&](auto lines, int64_t place) {
    Lanes lanes[lines * kLineLanes];
    for (int64_t line = 0; line < lines; ++line) {
      unpack_line(Element(), byte_at(in, place + line * kLineBytes), lanes + line * kLineLanes);
    }
    for (int64_t i = 0; i < targets.count; ++i) {
      const Lanes factor = Lanes::splat(targets.weights[i]);
      char* to = byte_at(targets.rows[i], place);
      prefetch_output<kStreams, lines>(to);
      for (int64_t line = 0; line < lines; ++line) {
        put_line<kStreams>(scaled_line<Element>(lanes + line * kLineLanes, factor), to + line * kLineBytes);
      }
    }
  });
  if (end == row_bytes) return;
  Tail<Element> tail(end, hidden);
  Lanes lanes[kLineLanes];
  unpack_line(Element(), tail.of(in), lanes);
  for (int64_t i = 0; i < targets.count; ++i) {
    tail.write(scaled_line<Element>(lanes, Lanes::splat(targets.weights[i])), targets.rows[i]);
  }
}

template <typename Element>
void scale_row(const void* in, const RowList& next, const Targets& targets, int64_t hidden, bool streams) {
  const auto scale = streams ? scale_lines<Element, true> : scale_lines<Element, false>;
  scale(in, next, targets, hidden);
}

// The sum of 16 lanes, halves onto halves.
inline float add_up(float* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The rows that a group of dot products reads.
struct DotRows {
  const void* rows[2 * kDotTerms];
  int64_t count = 0;

  DotRows(const DotTerms& terms, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      rows[count++] = terms.rows[i];
      if (i == first || terms.a[i] != terms.a[i - 1]) rows[count++] = terms.a[i];
    }
  }
  RowList list() const { return {rows, count}; }
};

// kCount dot products from the `first` term on; with kShared all of them have the same a. Element j is added to lane j % 16;
// lanes beyond the last element keep their bits.
template <typename Element, int64_t kCount, bool kScales, bool kShared>
void dot_some(const DotTerms& terms, int64_t first, const RowList& prefetched, const RowList& next, int64_t hidden,
              float* products) {
  constexpr int64_t kLineLanes = kLanesOfLine<Element>;
  const void *a[kCount], *rows[kCount];
  void* outs[kCount];
  Lanes weights[kCount], sums[kCount];
  for (int64_t i = 0; i < kCount; ++i) {
    a[i] = terms.a[first + i];
    rows[i] = terms.rows[first + i];
    outs[i] = terms.outs[first + i];
    weights[i] = Lanes::splat(terms.weights[first + i]);
    sums[i] = Lanes::splat(0.0f);
  }
  const int64_t end = for_lines<kLinesOfSomeRows>(prefetched, next, hidden * Element::kBytes, [&](auto lines, int64_t place) {
    for (int64_t line = 0; line < lines; ++line, place += kLineBytes) {
      Lanes factors[kLineLanes], to_scale[kLineLanes];
      const auto load_factors = [&](const char* from) {
        for (int64_t j = 0; j < kLineLanes; ++j) factors[j] = load_lanes<Element>(from, j);
        if (kScales) unpack_line(Element(), from, to_scale);
      };
      load_factors(byte_at(a[0], place));
      for (int64_t i = 0; i < kCount; ++i) {
        if (i > 0 && !kShared) load_factors(byte_at(a[i], place));
        for (int64_t j = 0; j < kLineLanes; ++j) {
          sums[i] = Lanes::fma(factors[j], load_lanes<Element>(byte_at(rows[i], place), j), sums[i]);
        }
        if (kScales) scaled_line<Element>(to_scale, weights[i]).stream(byte_at(outs[i], place));
      }
    }
  });
  Tail<Element> tail(end, hidden);
  const int64_t columns = tail.bytes / Element::kBytes;
  for (int64_t i = 0; i < kCount; ++i) {
    float lanes[kLanes], left[kLineColumns<Element>], right[kLineColumns<Element>];
    sums[i].get(lanes);
    if (columns > 0) {
      tail.of(a[i]);
      for (int64_t j = 0; j < kLineLanes; ++j) load_lanes<Element>(tail.padded, j).get(left + j * kLanes);
      tail.of(rows[i]);
      for (int64_t j = 0; j < kLineLanes; ++j) load_lanes<Element>(tail.padded, j).get(right + j * kLanes);
    }
    for (int64_t j = 0; j < columns; ++j) lanes[j % kLanes] = __builtin_fmaf(left[j], right[j], lanes[j % kLanes]);
    products[first + i] = add_up(lanes);
  }
}

// Groups of kCount terms from `first` on; returns the first term that is left.
template <typename Element, int64_t kCount>
int64_t dot_groups(const DotTerms& terms, int64_t first, const RowList& next, int64_t hidden, bool scales, float* products) {
  for (; first + kCount <= terms.count; first += kCount) {
    const void* const* a = terms.a + first;
    const bool shared = std::count(a, a + kCount, a[0]) == kCount;
    const auto dot = shared ? (scales ? dot_some<Element, kCount, true, true> : dot_some<Element, kCount, false, true>)
                            : (scales ? dot_some<Element, kCount, true, false> : dot_some<Element, kCount, false, false>);
    const DotRows rows(terms, first, first + kCount);
    dot(terms, first, rows.list(), next, hidden, products);
  }
  return first;
}

template <typename Element>
void dot_terms(const DotTerms& terms, const DotTerms& next, int64_t hidden, bool scales, float* products) {
  const DotRows following(next, 0, next.count);
  if (!scales && std::count(terms.a, terms.a + terms.count, terms.a[0]) == kDotTerms) {
    const DotRows rows(terms, 0, kDotTerms);
    return dot_some<Element, kDotTerms, false, true>(terms, 0, rows.list(), following.list(), hidden, products);
  }
  int64_t first = dot_groups<Element, kFewDotTerms>(terms, 0, following.list(), hidden, scales, products);
  first = dot_groups<Element, kTwoDotTerms>(terms, first, following.list(), hidden, scales, products);
  const auto dot = scales ? dot_some<Element, 1, true, true> : dot_some<Element, 1, false, true>;
  for (; first < terms.count; ++first) dot(terms, first, {nullptr, 0}, {nullptr, 0}, hidden, products);
}

#include "cpu/float8_codes.h"

// Plain loops over integers, which the compiler vectorises for the variant's target.
inline float quantize_group(const float* values, float amax_min, bool ue8m0, uint8_t* codes) {
  int32_t amax = 0;
  for (int64_t i = 0; i < kGroupColumns; ++i) {
    const auto magnitude = static_cast<int32_t>(float_bits(values[i]) & 0x7FFFFFFFu);
    const int32_t number = magnitude & mask_if(magnitude <= 0x7F800000);  // 0 for NaN
    amax = std::max(amax, number);
  }
  float scale = std::min(std::max(bits_float(static_cast<uint32_t>(amax)), amax_min), FLT_MAX) / 448.0f;
  if (ue8m0) scale = bits_float((float_bits(scale) + 0x7FFFFFu) >> 23 << 23);
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < kGroupColumns; ++i) codes[i] = static_cast<uint8_t>(to_e4m3(values[i] * inverse));
  return scale;
}

template <typename Element>
void quantize_row(const void* in, int64_t hidden, float amax_min, bool ue8m0, uint8_t* codes, float* scales) {
  for (int64_t column = 0; column < hidden; column += kGroupColumns) {
    const int64_t count = std::min(kGroupColumns, hidden - column);
    const char* from = byte_at(in, column * Element::kBytes);
    char padded_in[kGroupColumns * Element::kBytes] = {};
    uint8_t padded_codes[kGroupColumns];
    if (count < kGroupColumns) {
      std::memcpy(padded_in, from, count * Element::kBytes);
      from = padded_in;
    }
    float values[kGroupColumns];
    for (int64_t j = 0; j < kGroupColumns / kLanes; ++j) load_lanes<Element>(from, j).get(values + j * kLanes);
    uint8_t* to = count < kGroupColumns ? padded_codes : codes + column;
    *scales++ = quantize_group(values, amax_min, ue8m0, to);
    if (count < kGroupColumns) std::memcpy(codes + column, padded_codes, count);
  }
}

// Exact. The low half of a NaN is zero, as rounding to bfloat16 needs it.
inline float from_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  // A subnormal code is its mantissa * 2^-9: put that under the exponent of 2^-6, then subtract 2^-6.
  const float subnormal = bits_float((magnitude << 20) + (121u << 23)) - bits_float(121u << 23);
  const uint32_t normal = (magnitude << 20) + (120u << 23);  // exponent bias 7 -> 127
  const uint32_t finite = magnitude < 8u ? float_bits(subnormal) : normal;
  return bits_float((code & 0x80u) << 24 | (magnitude == 0x7Fu ? 0x7FC00000u : finite));
}

template <typename Element>
inline Line dequantized_line(const uint8_t* codes, float scale) {
  Lanes lanes[kLanesOfLine<Element>];
  for (int64_t j = 0; j < kLanesOfLine<Element>; ++j) {
    float values[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) values[lane] = from_e4m3(codes[column_of(Element(), j, lane)]);
    lanes[j] = load_lanes<Float32>(reinterpret_cast<const char*>(values), 0);
  }
  return scaled_line<Element>(lanes, Lanes::splat(with_plain_nan(scale)));
}

template <typename Element, bool kStreams>
void dequantize_lines(const uint8_t* codes, const float* scales, int64_t hidden, void* out) {
  static_assert(kGroupColumns % kLineColumns<Element> == 0, "the elements of a line share a scale");
  int64_t column = 0;
  for (; column + kLineColumns<Element> <= hidden; column += kLineColumns<Element>) {
    put_line<kStreams>(dequantized_line<Element>(codes + column, scales[column / kGroupColumns]),
                       byte_at(out, column * Element::kBytes));
  }
  if (column == hidden) return;
  uint8_t padded[kLineColumns<Element>] = {};
  std::memcpy(padded, codes + column, hidden - column);
  Tail<Element>(column * Element::kBytes, hidden).write(dequantized_line<Element>(padded, scales[column / kGroupColumns]), out);
}

template <typename Element>
void dequantize_row(const uint8_t* codes, const float* scales, int64_t hidden, bool streams, void* out) {
  const auto dequantize = streams ? dequantize_lines<Element, true> : dequantize_lines<Element, false>;
  dequantize(codes, scales, hidden, out);
}

// Streaming begins at the first whole line of the targets, which must all be at the same offset within a line. Incomplete lines at both
// ends are stored as usual: another thread may write the rest of them.
template <bool kStreams>
void copy_lines(const void* in, int64_t bytes, const RowList& next, void* const* targets, int64_t count) {
  const auto to_line = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(targets[0]) % kLineBytes);
  const int64_t head = kStreams ? std::min(bytes, to_line) : 0;
  const void* from = byte_at(in, head);
  const RowList rows = {&from, 1};
  const int64_t end = for_lines<kLinesOfOneRow>(rows, next, bytes - head, [&](auto lines, int64_t place) {
    Line copied[lines];
    for (int64_t line = 0; line < lines; ++line) copied[line] = Line::load(byte_at(from, place + line * kLineBytes));
    for (int64_t i = 0; i < count; ++i) {
      char* to = byte_at(targets[i], head + place);
      prefetch_output<kStreams, lines>(to);
      for (int64_t line = 0; line < lines; ++line) put_line<kStreams>(copied[line], to + line * kLineBytes);
    }
  });
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(targets[i], in, head);
    std::memcpy(byte_at(targets[i], head + end), byte_at(from, end), bytes - head - end);
  }
}

void copy_row(const void* in, int64_t bytes, const RowList& next, const Targets& targets, bool streams) {
  if (!streams) {
    copy_lines<false>(in, bytes, next, targets.rows, targets.count);
  } else if (bytes % kLineBytes == 0) {  // as are the distances of rows
    copy_lines<true>(in, bytes, next, targets.rows, targets.count);
  } else {
    for (int64_t i = 0; i < targets.count; ++i) copy_lines<true>(in, bytes, next, targets.rows + i, 1);
  }
}

template <typename Element>
constexpr RowKernels kKernels = {sum_rows<Element>,     scale_row<Element>,      dot_terms<Element>,
                                 quantize_row<Element>, dequantize_row<Element>, copy_row};
constexpr RowKernels kOtherTypes = {nullptr, nullptr, nullptr, nullptr, nullptr, copy_row};

const RowKernels* kernels_for(int32_t dtype) {
  if (!is_sum_dtype(dtype)) return &kOtherTypes;
  return with_sum_dtype<Float32, Float16, BFloat16>(dtype, [](auto element) { return &kKernels<decltype(element)>; });
}
