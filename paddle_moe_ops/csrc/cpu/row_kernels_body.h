// Copyright 2026 The paddle_moe_ops authors
// SPDX-License-Identifier: Apache-2.0

// The bodies behind row_kernels.h, over 16 float32 lanes that each variant provides.
//
// Included once per variant, inside an anonymous namespace (so that no variant's code can stand in for another's when the linker
// merges inline functions) and after all standard headers (so that none of their code is compiled for the variant's target).
// The including file defines Lanes (16 floats; rows may begin at any address) and Line (kLineBytes of the output).
//
// Sums run over strips of columns that stay in registers while all rows of a token pass, so each row is read once and the output
// is written once.

constexpr int64_t kLanes = 16;
constexpr int64_t kStripColumns = 4 * kLanes;
static_assert(kStripColumns == kLineBytes, "a strip of bytes is a line");
constexpr int64_t kAheadBytes = 2048;  // of each row: enough to hide the memory's latency, few enough for the first-level cache

template <typename Element>
constexpr int64_t kLineColumns = kLineBytes / Element::kBytes;
template <typename Element>
constexpr int64_t kLanesOfLine = kLineColumns<Element> / kLanes;

template <typename Element>
inline const char* element_at(const void* row, int64_t column) {
  return static_cast<const char*>(row) + column * Element::kBytes;
}

// Asks for what follows `column` by kAheadBytes: lines of the same rows, or behind their end of the next ones. `end` is where the
// strips of a row end. Inlined always: GCC takes a function that only prefetches for one without effect, and drops its calls.
template <typename Element>
__attribute__((always_inline)) inline void prefetch_ahead(const RowList& rows, const RowList& next, int64_t column, int64_t end) {
  const int64_t place = column + std::min(kAheadBytes / Element::kBytes, end);
  const RowList& list = place < end ? rows : next;
  for (int64_t i = 0; i < list.count; ++i) {
    const char* strip = element_at<Element>(list.rows[i], place < end ? place : place - end);
    for (int64_t byte = 0; byte < kStripColumns * Element::kBytes; byte += kLineBytes) __builtin_prefetch(strip + byte, 0, 3);
  }
}

template <typename Element>
inline Lanes load_lanes(const char* from, int64_t index) {
  return Lanes::load(Element(), from + index * kLanes * Element::kBytes);
}

// Weights enter through here. Any NaN will do, and one whose low half is zero makes every NaN that arithmetic makes of it and of
// bfloat16 rows have one: rounding to bfloat16 then needs no case for NaN.
inline Lanes splat_weight(float weight) { return Lanes::splat(weight == weight ? weight : __builtin_nanf("")); }

// The last columns of a row, fewer than a line holds.
template <typename Element>
struct Columns {
  const int64_t first;
  const int64_t count;
  char padded[kLineBytes] = {};

  Columns(int64_t column, int64_t hidden) : first(column), count(hidden - column) {}

  // These columns of a row as a whole line with zeros at its end; valid until the next call.
  const char* of(const void* row) {
    std::memcpy(padded, element_at<Element>(row, first), count * Element::kBytes);
    return padded;
  }

  void write(const Line& line, void* row) const {
    char whole[kLineBytes];
    line.store(whole);
    std::memcpy(static_cast<char*>(row) + first * Element::kBytes, whole, count * Element::kBytes);
  }
};

template <bool kWeighted>
inline Lanes add_row(const Lanes& sum, const Lanes& row, const Lanes& weight) {
  return kWeighted ? Lanes::fma(row, weight, sum) : Lanes::add(sum, row);
}

template <typename Element, bool kWeighted, int64_t kCount>
inline void sum_lanes(const RowList& rows, const float* weights, int64_t column, Lanes* sums) {
  for (int64_t j = 0; j < kCount; ++j) sums[j] = Lanes::splat(-0.0f);
  for (int64_t i = 0; i < rows.count; ++i) {
    const Lanes weight = splat_weight(kWeighted ? weights[i] : 0.0f);
    const char* row = element_at<Element>(rows.rows[i], column);
    for (int64_t j = 0; j < kCount; ++j) sums[j] = add_row<kWeighted>(sums[j], load_lanes<Element>(row, j), weight);
  }
}

template <typename Element, bool kStreams, int64_t kCount>
inline void put_lanes(const Lanes* lanes, char* to) {
  for (int64_t j = 0; j < kCount; j += kLanesOfLine<Element>, to += kLineBytes) {
    const Line line = Line::pack(Element(), lanes + j);
    kStreams ? line.stream(to) : line.store(to);
  }
}

template <typename Element, bool kWeighted, bool kStreams>
void sum_strips(const RowList& rows, const RowList& next, const float* weights, int64_t hidden, void* out) {
  constexpr int64_t kStripLanes = kStripColumns / kLanes;
  constexpr int64_t kLineLanes = kLanesOfLine<Element>;
  char* to = static_cast<char*>(out);
  Lanes sums[kStripLanes];
  const int64_t end = hidden / kStripColumns * kStripColumns;
  int64_t column = 0;
  for (; column < end; column += kStripColumns) {
    prefetch_ahead<Element>(rows, next, column, end);
    sum_lanes<Element, kWeighted, kStripLanes>(rows, weights, column, sums);
    put_lanes<Element, kStreams, kStripLanes>(sums, to + column * Element::kBytes);
  }
  for (; column + kLineColumns<Element> <= hidden; column += kLineColumns<Element>) {
    sum_lanes<Element, kWeighted, kLineLanes>(rows, weights, column, sums);
    put_lanes<Element, kStreams, kLineLanes>(sums, to + column * Element::kBytes);
  }
  if (column == hidden) return;
  Columns<Element> columns(column, hidden);
  for (int64_t j = 0; j < kLineLanes; ++j) sums[j] = Lanes::splat(-0.0f);
  for (int64_t i = 0; i < rows.count; ++i) {
    const char* row = columns.of(rows.rows[i]);
    const Lanes weight = splat_weight(kWeighted ? weights[i] : 0.0f);
    for (int64_t j = 0; j < kLineLanes; ++j) sums[j] = add_row<kWeighted>(sums[j], load_lanes<Element>(row, j), weight);
  }
  columns.write(Line::pack(Element(), sums), out);
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

template <typename Element, bool kStreams>
void scale_lines(const void* in, const RowList& next, float weight, int64_t hidden, void* out) {
  const RowList rows = {&in, 1};
  const Lanes factor = splat_weight(weight);
  const int64_t end = hidden / kStripColumns * kStripColumns;
  Lanes lanes[kLanesOfLine<Element>];
  int64_t column = 0;
  for (; column + kLineColumns<Element> <= hidden; column += kLineColumns<Element>) {
    if (column % kStripColumns == 0 && column < end) prefetch_ahead<Element>(rows, next, column, end);
    for (int64_t j = 0; j < kLanesOfLine<Element>; ++j) lanes[j] = load_lanes<Element>(element_at<Element>(in, column), j);
    const Line line = scaled_line<Element>(lanes, factor);
    char* to = static_cast<char*>(out) + column * Element::kBytes;
    kStreams ? line.stream(to) : line.store(to);
  }
  if (column == hidden) return;
  Columns<Element> columns(column, hidden);
  for (int64_t j = 0; j < kLanesOfLine<Element>; ++j) lanes[j] = load_lanes<Element>(columns.of(in), j);
  columns.write(scaled_line<Element>(lanes, factor), out);
}

template <typename Element>
void scale_row(const void* in, const RowList& next, float weight, int64_t hidden, bool streams, void* out) {
  const auto scale = streams ? scale_lines<Element, true> : scale_lines<Element, false>;
  scale(in, next, weight, hidden, out);
}

// The sum of 16 lanes, halves onto halves.
inline float add_up(float* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The rows that some dot products read.
struct DotRows {
  const void* rows[2 * kDotTerms];
  int64_t count = 0;

  explicit DotRows(const DotTerms& terms) {
    for (int64_t i = 0; i < terms.count; ++i) {
      rows[count++] = terms.rows[i];
      if (i == 0 || terms.a[i] != terms.a[i - 1]) rows[count++] = terms.a[i];
    }
  }
  RowList list() const { return {rows, count}; }
};

// kCount dot products from the `first` term on. Element j is added to lane j % 16; a lane without a last element keeps its
// bits.
template <typename Element, int64_t kCount, bool kScales, bool kShared>
void dot_some(const DotTerms& terms, int64_t first, const RowList& rows, const RowList& next, int64_t hidden, float* products) {
  constexpr int64_t kLineLanes = kLanesOfLine<Element>;
  const int64_t end = hidden / kStripColumns * kStripColumns;
  Lanes sums[kCount];
  for (int64_t i = 0; i < kCount; ++i) sums[i] = Lanes::splat(0.0f);
  int64_t column = 0;
  for (; column + kLineColumns<Element> <= hidden; column += kLineColumns<Element>) {
    if (column % kStripColumns == 0 && column < end) prefetch_ahead<Element>(rows, next, column, end);
    Lanes factors[kLineLanes];
    const auto load_factors = [&](int64_t i) {
      const char* a = element_at<Element>(terms.a[first + i], column);
      for (int64_t j = 0; j < kLineLanes; ++j) factors[j] = load_lanes<Element>(a, j);
    };
    load_factors(0);
    for (int64_t i = 0; i < kCount; ++i) {
      const char* row = element_at<Element>(terms.rows[first + i], column);
      if (i > 0 && !kShared) load_factors(i);
      for (int64_t j = 0; j < kLineLanes; ++j) sums[i] = Lanes::fma(factors[j], load_lanes<Element>(row, j), sums[i]);
      if (!kScales) continue;
      char* out = static_cast<char*>(terms.outs[first + i]) + column * Element::kBytes;
      scaled_line<Element>(factors, splat_weight(terms.weights[first + i])).stream(out);
    }
  }
  Columns<Element> columns(column, hidden);
  for (int64_t i = 0; i < kCount; ++i) {
    float lanes[kLanes], left[kLineColumns<Element>], right[kLineColumns<Element>];
    sums[i].get(lanes);
    if (columns.count > 0) {
      const char* a = columns.of(terms.a[first + i]);
      for (int64_t j = 0; j < kLineLanes; ++j) load_lanes<Element>(a, j).get(left + j * kLanes);
      const char* row = columns.of(terms.rows[first + i]);
      for (int64_t j = 0; j < kLineLanes; ++j) load_lanes<Element>(row, j).get(right + j * kLanes);
    }
    for (int64_t j = 0; j < columns.count; ++j) lanes[j % kLanes] = __builtin_fmaf(left[j], right[j], lanes[j % kLanes]);
    products[first + i] = add_up(lanes);
  }
}

template <typename Element>
void dot_terms(const DotTerms& terms, const DotTerms& next, int64_t hidden, bool scales, float* products) {
  const DotRows rows(terms), following(next);
  if (terms.count == kDotTerms) {
    const bool shared = std::count(terms.a, terms.a + kDotTerms, terms.a[0]) == kDotTerms;
    const auto dot = shared ? (scales ? dot_some<Element, kDotTerms, true, true> : dot_some<Element, kDotTerms, false, true>)
                            : (scales ? dot_some<Element, kDotTerms, true, false> : dot_some<Element, kDotTerms, false, false>);
    dot(terms, 0, rows.list(), following.list(), hidden, products);
    return;
  }
  const auto dot = scales ? dot_some<Element, 1, true, true> : dot_some<Element, 1, false, true>;
  for (int64_t i = 0; i < terms.count; ++i) dot(terms, i, {rows.rows, 0}, {rows.rows, 0}, hidden, products);
}

// All bits set if the condition holds, for choices without branches, which would keep a loop from being vectorised.
inline int32_t mask_if(bool condition) { return -static_cast<int32_t>(condition); }

// The e4m3fn number nearest to a value, ties to even; 448 for what is larger, 0x7F for NaN.
inline int32_t to_e4m3(float value) {
  const auto bits = static_cast<int32_t>(float_bits(value));
  const int32_t magnitude = bits & 0x7FFFFFFF;
  const int32_t normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20;  // exponent bias 127 -> 7
  // Below 2^-6 the result is subnormal: adding 2^14 puts the last place of the sum at 2^-9, and the addition rounds.
  const float sum = bits_float(static_cast<uint32_t>(magnitude)) + 16384.0f;
  const int32_t subnormal = static_cast<int32_t>(float_bits(sum)) - static_cast<int32_t>(float_bits(16384.0f));
  const int32_t is_subnormal = mask_if(magnitude < (121 << 23)), is_nan = mask_if(magnitude > 0x7F800000);
  const int32_t rounded = std::min((subnormal & is_subnormal) | (normal & ~is_subnormal), 0x7E);
  return (0x7F & is_nan) | ((rounded | ((bits >> 24) & 0x80)) & ~is_nan);
}

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
    const char* from = element_at<Element>(in, column);
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

// Exact. NaN has a low half of zeros, as rounding to bfloat16 wants it.
inline float from_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  // A subnormal code is its mantissa * 2^-9: put that under the exponent of 2^-6, take 2^-6 away again.
  const float subnormal = bits_float((magnitude << 20) + (121u << 23)) - bits_float(121u << 23);
  const uint32_t normal = (magnitude << 20) + (120u << 23);  // exponent bias 7 -> 127
  const uint32_t finite = magnitude < 8u ? float_bits(subnormal) : normal;
  return bits_float((code & 0x80u) << 24 | (magnitude == 0x7Fu ? 0x7FC00000u : finite));
}

template <typename Element>
inline Line dequantized_line(const uint8_t* codes, float scale) {
  float values[kLineColumns<Element>];
  for (int64_t i = 0; i < kLineColumns<Element>; ++i) values[i] = from_e4m3(codes[i]);
  Lanes lanes[kLanesOfLine<Element>];
  for (int64_t j = 0; j < kLanesOfLine<Element>; ++j) {
    lanes[j] = load_lanes<Float32>(reinterpret_cast<const char*>(values), j);
  }
  return scaled_line<Element>(lanes, splat_weight(scale));
}

template <typename Element, bool kStreams>
void dequantize_lines(const uint8_t* codes, const float* scales, int64_t hidden, void* out) {
  static_assert(kGroupColumns % kLineColumns<Element> == 0, "the elements of a line share a scale");
  int64_t column = 0;
  for (; column + kLineColumns<Element> <= hidden; column += kLineColumns<Element>) {
    const Line line = dequantized_line<Element>(codes + column, scales[column / kGroupColumns]);
    char* to = static_cast<char*>(out) + column * Element::kBytes;
    kStreams ? line.stream(to) : line.store(to);
  }
  if (column == hidden) return;
  uint8_t padded[kLineColumns<Element>] = {};
  std::memcpy(padded, codes + column, hidden - column);
  const Columns<Element> columns(column, hidden);
  columns.write(dequantized_line<Element>(padded, scales[column / kGroupColumns]), out);
}

template <typename Element>
void dequantize_row(const uint8_t* codes, const float* scales, int64_t hidden, bool streams, void* out) {
  const auto dequantize = streams ? dequantize_lines<Element, true> : dequantize_lines<Element, false>;
  dequantize(codes, scales, hidden, out);
}

// What is less than a line at both ends is stored as usual: a neighbour may write the rest of that line.
void stream_copy(const void* in, int64_t bytes, const RowList& next, void* out) {
  const char* from = static_cast<const char*>(in);
  char* to = static_cast<char*>(out);
  const RowList rows = {&in, 1};
  int64_t done = std::min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLineBytes));
  std::memcpy(to, from, done);
  for (; done + kLineBytes <= bytes; done += kLineBytes) {
    prefetch_ahead<Byte>(rows, next, done, bytes);
    Line::load(from + done).stream(to + done);
  }
  std::memcpy(to + done, from + done, bytes - done);
}

template <typename Element>
constexpr RowKernels kKernels = {sum_rows<Element>,     scale_row<Element>,      dot_terms<Element>,
                                 quantize_row<Element>, dequantize_row<Element>, stream_copy};
constexpr RowKernels kOtherTypes = {nullptr, nullptr, nullptr, nullptr, nullptr, stream_copy};

const RowKernels* kernels_for(int32_t dtype) {
  switch (dtype) {
    case PMO_FLOAT32:
      return &kKernels<Float32>;
    case PMO_FLOAT16:
      return &kKernels<Float16>;
    case PMO_BFLOAT16:
      return &kKernels<BFloat16>;
    default:
      return &kOtherTypes;
  }
}
