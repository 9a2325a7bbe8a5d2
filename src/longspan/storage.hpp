/// \file
/// How rows of queries, keys and values lie in memory: the bytes of their elements, and the scales
/// of quantised ones.
///
/// StorageFormat counts the bytes of such rows wherever they lie: in tensors, in caches, and in the
/// buffers in which they, and finished rows, travel. It counts in bits, because an element may be
/// smaller than a byte. size_of counts the bytes of one element of all other arrays, which have
/// whole bytes: lengths, tables, sinks, slopes, results, files, and tensors of which only the type
/// is known. A kernel that is compiled for one type of element uses sizeof.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/types.hpp"

namespace longspan {

/// How the elements of a row lie in memory. Strides and offsets of rows are counted in elements; in
/// rows that carry their scales (RowFormat) an element is a byte.
struct StorageFormat {
  int bits = 32;             ///< of an element
  bool needs_scale = false;  ///< a stored x stands for x times a scale (ScaleView)
  int row = 0;               ///< bytes of a row that carries its scales; 0: a row has none

  /// The bytes of `elements` elements, for offsets and strides.
  LONGSPAN_HD constexpr std::int64_t bytes(std::int64_t elements) const {
    return elements * bits >> 3;
  }
  /// The elements that a row of `dim` numbers takes.
  LONGSPAN_HD constexpr int row_elements(int dim) const { return row > 0 && dim > 0 ? row : dim; }
  /// The bytes of a row of `dim` numbers; the next row begins at a whole byte.
  LONGSPAN_HD constexpr std::int64_t row_bytes(int dim) const {
    return (std::int64_t{row_elements(dim)} * bits + 7) >> 3;
  }
  /// The elements in `bytes` bytes.
  template <class Int>
  LONGSPAN_HD constexpr Int elements(Int bytes) const {
    return bytes * 8 / bits;
  }
};

/// A code of fewer bits than the number that it stands for, before its scale.
enum class Code : std::uint8_t {
  fp8,  ///< e4m3, a byte
  fp4,  ///< e2m1, four bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; the even number has the low
        ///< ones
};

/// The scale of a group of codes.
enum class GroupScale : std::uint8_t {
  single,        ///< fp32
  power,         ///< ue8m0, a power of two: a byte b is 2^(b - 127), 255 is NaN
  fp8_permuted,  ///< e4m3, a byte; that of group g is byte 8 (g % 4) + g / 4
};

/// How an append makes the scale of a group from amax, the largest size of its numbers.
enum class ScaleRule : std::uint8_t {
  none,          ///< such rows are read only
  amax,          ///< amax / 448, at least the smallest normal fp32
  power_of_two,  ///< the same, but at least 1e-4, and rounded up to a power of two
};

/// The layout of a row that carries its scales. Its first `coded` numbers are codes in groups that
/// share a scale, and the others are numbers of type `rest`. The row is K, and its first value_dim
/// numbers are V.
struct RowFormat {
  int bytes = 0;                          ///< of a row, scales included; 0: no such row
  int dim = 0;                            ///< numbers of a row
  int value_dim = 0;                      ///< the first of them, which are the values
  int coded = 0;                          ///< the first of them, which are codes, from byte 0 on
  Code code = Code::fp8;                  ///< of these
  int group = 1;                          ///< numbers that share a scale
  GroupScale scale = GroupScale::single;  ///< of a group
  int scales_at = 0;                      ///< the byte of the row where the scales begin
  int rest_at = 0;                        ///< the byte where the other numbers begin
  DType rest = DType::bf16;               ///< their type: bf16 or e4m3
  ScaleRule rule = ScaleRule::none;       ///< of an append
  int apart = 0;                          ///< bytes of a row's scales, where in pages the
                                          ///< scales of all rows follow the data of all rows;
                                          ///< 0: they are in their rows

  /// The bytes of a row's data, from one row of a page to the next.
  LONGSPAN_HD constexpr int data_bytes() const { return bytes - apart; }
};

/// The table of rows that carry their scales; no bytes for any other type.
LONGSPAN_HD constexpr RowFormat row_format_of(DType dtype) {
  RowFormat f;
  switch (dtype) {
    case DType::latent656:
    case DType::latent656_pow2:
      f = {656, 576, 512, 512, Code::fp8, 128, GroupScale::single, 512, 528};
      f.rule = dtype == DType::latent656 ? ScaleRule::amax : ScaleRule::power_of_two;
      return f;
    case DType::latent584:
      f = {584, 512, 512, 448, Code::fp8, 64, GroupScale::power, 576, 448};
      f.rule = ScaleRule::power_of_two;
      f.apart = 8;
      return f;
    case DType::latent528:
      return {528, 512, 512, 512, Code::fp8, 32, GroupScale::power, 512, 528};
    case DType::latent352:
      f = {352, 576, 512, 512, Code::fp4, 16, GroupScale::fp8_permuted, 320, 256};
      f.rest = DType::e4m3;
      return f;
    default:
      return f;
  }
}

/// The table of storage formats, by the type of an element. In kernels a switch takes more
/// instructions than conditions.
LONGSPAN_HD constexpr StorageFormat storage_of(DType dtype) {
  const int bits = dtype == DType::fp32 || dtype == DType::int32   ? 32
                   : dtype == DType::fp16 || dtype == DType::bf16  ? 16
                   : dtype == DType::int64 || dtype == DType::fp64 ? 64
                                                                   : 8;
  return {.bits = bits,
          .needs_scale = is_fp8(dtype),
          .row = is_latent_row(dtype) ? row_format_of(dtype).bytes : 0};
}

/// The type of a tensor that holds such rows: those that carry their scales are bytes.
constexpr DType tensor_type_of(DType dtype) { return is_latent_row(dtype) ? DType::uint8 : dtype; }

/// Bytes of one element of an array.
LONGSPAN_HD constexpr std::size_t size_of(DType dtype) {
  return static_cast<std::size_t>(storage_of(dtype).bits) / 8;
}

/// Scales of quantised rows, fp32. A stored element x stands for x * scale. One scale of a whole
/// tensor has strides of 0. Scales of kv heads have a head_stride, those of each sequence and kv
/// head a sequence_stride too, and scales of keys the others.
struct ScaleView {
  const float* data = nullptr;       ///< null: not given, and all scales are 1
  std::int64_t page_stride = 0;      ///< from page to page of a cache, in scales
  std::int64_t row_stride = 0;       ///< from key to key
  std::int64_t head_stride = 0;      ///< from kv head to kv head
  std::int64_t sequence_stride = 0;  ///< from sequence to sequence

  /// None.
  ScaleView() = default;
  /// Scales at any strides. There is no constructor of fewer arguments, because {data, true} would
  /// mean strides.
  LONGSPAN_HD ScaleView(const float* scales, std::int64_t page, std::int64_t row, std::int64_t head,
                        std::int64_t sequence = 0)
      : data(scales),
        page_stride(page),
        row_stride(row),
        head_stride(head),
        sequence_stride(sequence) {}
  /// One scale of a tensor, [1], or one of each kv head, [kv_heads].
  static ScaleView dense(const float* data, std::int64_t count) {
    return {data, 0, 0, count > 1 ? 1 : 0};
  }

  /// Whether they are given.
  LONGSPAN_HD explicit operator bool() const { return data != nullptr; }
  /// The scale of a sequence's kv head, which all its rows share; 1 if none is given.
  LONGSPAN_HD float of(int sequence, int kv_head) const {
    return data == nullptr ? 1.0f : data[sequence * sequence_stride + kv_head * head_stride];
  }
  /// The scales of one sequence alone.
  LONGSPAN_HD ScaleView of_sequence(int sequence) const {
    return {data + sequence * sequence_stride, page_stride, row_stride, head_stride};
  }
  /// The scales of one row of a page; a cache without pages has one page.
  LONGSPAN_HD ScaleView of_row(std::int64_t page, std::int64_t row) const {
    return {data + page * page_stride + row * row_stride, 0, 0, head_stride, sequence_stride};
  }
  /// The scales of the kv heads from `kv_head` on.
  ScaleView from_head(int kv_head) const {
    return {data + kv_head * head_stride, page_stride, row_stride, head_stride, sequence_stride};
  }
  /// The number of different scales of a row of `kv_heads` heads.
  int count(int kv_heads) const { return head_stride == 0 ? 1 : kv_heads; }
  /// The number of sequences, of a batch, whose scales differ.
  int sequences(int batch) const { return sequence_stride == 0 ? 1 : batch; }

  /// Whether both are the same memory, read alike.
  bool operator==(const ScaleView&) const = default;
};

}  // namespace longspan
