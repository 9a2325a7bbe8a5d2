// Tensors for kernels: plain data, an address and strides. Host and CUDA kernels take the same
// structs.
//
// Names: tokens = query rows over the batch, heads, kv_heads, head_dim (of queries and keys),
// value_dim (of values, states and results), kv_len, ranks; group = heads / kv_heads. A "row" of a
// state is one (token, head), numbered token * heads + head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/state.hpp"
#include "longspan/storage.hpp"
#include "longspan/stored_row.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// Head dims are any; buffers of our own whose rows are read in vectors pad each row to a multiple
/// of this many elements.
inline constexpr int kDimStep = 8;
LONGSPAN_HD constexpr int padded_dim(int dim) { return (dim + kDimStep - 1) / kDimStep * kDimStep; }

/// A tensor [n, heads, columns] whose innermost dimension is dense. Strides are in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  LONGSPAN_HD std::int64_t offset(std::int64_t row, std::int64_t head) const {
    return row * row_stride + head * head_stride;
  }
  template <class T>
  LONGSPAN_HD T* at(std::int64_t row, std::int64_t head) const {
    return static_cast<T*>(data) + offset(row, head);
  }
  /// The address of the element that is `elements` after the first.
  LONGSPAN_HD std::byte* address(const StorageFormat& format, std::int64_t elements) const {
    return static_cast<std::byte*>(data) + format.bytes(elements);
  }
};

/// The extra distance between the sequences of a batch whose rows otherwise have equal steps. A
/// dense [batch, heads, tokens, columns] has `rows` = tokens, and the rows of the other heads are
/// the gap.
struct SequenceGap {
  std::int64_t elements = 0;
  std::uint32_t rows = 0;  // of each sequence; 0: all rows have equal steps

  /// The elements of all gaps before a row of the batch.
  LONGSPAN_HD std::int64_t before(std::int64_t row) const {
    return rows == 0 ? 0 : static_cast<std::uint32_t>(row) / rows * elements;
  }
};

/// Queries or results, [tokens, heads, columns] over the batch.
struct TokenRows : Rows {
  SequenceGap gap;

  TokenRows() = default;
  LONGSPAN_HD TokenRows(const Rows& rows) : Rows(rows) {}
  LONGSPAN_HD TokenRows(void* memory, std::int64_t row, std::int64_t head, SequenceGap apart = {})
      : Rows{memory, row, head}, gap(apart) {}

  LONGSPAN_HD std::int64_t offset(std::int64_t row, std::int64_t head) const {
    return Rows::offset(row, head) + gap.before(row);
  }
  template <class T>
  LONGSPAN_HD T* at(std::int64_t row, std::int64_t head) const {
    return static_cast<T*>(data) + offset(row, head);
  }
};

/// Keys or values, contiguous or in pages. A key's row of one head is stored in chunks of `chunk`
/// elements: element d is at
///     page * page_stride + row * row_stride + head * head_stride
///     + d / chunk * chunk_stride + d % chunk * dim_stride.
/// Dense rows have chunk_stride = chunk and dim_stride = 1. K in x-packed pages [pages, kv_heads,
/// dim / x, page, x] has chunk = x and row_stride = x. V in [pages, kv_heads, dim, page] has
/// dim_stride = page.
///
/// Of rows that carry their scales (RowFormat) an element is a byte, and the scales of a row are at
///     page * page_stride + scales_at + row * scales_stride.
struct KvRows : Rows {
  std::int64_t page_stride = 0;
  int chunk = 8;
  std::int64_t chunk_stride = 8;
  std::int64_t dim_stride = 1;
  std::int64_t scales_at = 0;
  std::int64_t scales_stride = 0;

  KvRows() = default;
  LONGSPAN_HD KvRows(void* memory, std::int64_t row, std::int64_t head) : Rows{memory, row, head} {}
  /// Dense rows of `heads` heads of `dim` numbers of any type, one after the other.
  KvRows(void* memory, DType dtype, int heads, int dim)
      : Rows{memory, std::int64_t{heads} * storage_of(dtype).row_elements(dim),
             storage_of(dtype).row_elements(dim)} {
    carry_scales(row_format_of(dtype), 0);
  }

  /// Says where the scales of rows lie that carry them, in pages of `page` rows; 0: no pages.
  void carry_scales(const RowFormat& format, std::int64_t page) {
    if (format.bytes == 0) return;
    scales_at = format.scales_at;
    scales_stride = row_stride;
    if (page == 0 || format.apart == 0) return;
    row_stride = format.data_bytes();
    scales_at = page * row_stride;
    scales_stride = format.apart;
  }
  /// A row that carries its scales; there is one kv head.
  LONGSPAN_HD StoredRow stored(std::int64_t page, std::int64_t row) const {
    std::byte* const at = static_cast<std::byte*>(data) + page * page_stride;
    return {at + row * row_stride, at + scales_at + row * scales_stride};
  }
  /// The scales of rows that lie apart from their data, as rows of `format.apart` bytes.
  LONGSPAN_HD KvRows scales_apart() const {
    KvRows scales(static_cast<std::byte*>(data) + scales_at, scales_stride, 0);
    scales.page_stride = page_stride;
    return scales;
  }

  LONGSPAN_HD bool dense() const { return chunk_stride == chunk && dim_stride == 1; }
  /// The offset of element d in its row, in elements.
  LONGSPAN_HD std::int64_t column(int d) const {
    return d / chunk * chunk_stride + d % chunk * dim_stride;
  }
};

/// What is copied of keys, part by part. `scales` are those that lie apart from their rows.
enum class KeyPart : std::uint8_t { keys, values, scales };

/// The pages of a sequence: local key i of sequence b lies in row i % page_size of page table[b *
/// row_stride + i / page_size * column_stride]. Entries that no visible key needs may hold anything
/// and are not read.
struct Pages {
  const std::int32_t* table = nullptr;  // [batch, columns]; null: the keys are contiguous
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
  std::int64_t columns = 0;
  std::int64_t count = 0;  // pages in the cache, for checks
  int size = 1;            // keys in a page

  LONGSPAN_HD explicit operator bool() const { return table != nullptr; }
  LONGSPAN_HD std::int64_t page(int b, std::int64_t local_key) const {
    return table[b * row_stride + local_key / size * column_stride];
  }
};

/// Keys that lie in several places, as received from ranks; only on CPUs. A span's rows are
/// contiguous, from k and from v on, up to the first row of the next span.
struct KeySpan {
  std::int64_t first = 0;  // row, over all sequences
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
};
struct KeySpans {
  const KeySpan* data = nullptr;  // [count], rows ascend from 0 on; null: the keys are in one place
  std::int64_t count = 0;

  LONGSPAN_HD explicit operator bool() const { return data != nullptr; }
};

/// The states of `rows` rows in `slots` equal slots, `slot_bytes` apart: one slot per rank, or per
/// split of a rank's keys. A slot is Stats [rows], then o [rows, columns()] in fp32, of which a row
/// has `dim` numbers, the value_dim of the attention; what is in the others does not matter.
struct StateSlots {
  std::byte* data = nullptr;
  std::int64_t rows = 0;
  int dim = 0;
  int slots = 1;

  LONGSPAN_HD static std::int64_t stats_bytes(std::int64_t rows) {
    return (rows * 8 + 15) / 16 * 16;
  }
  LONGSPAN_HD static std::int64_t bytes(std::int64_t rows, int dim) {
    return stats_bytes(rows) + rows * padded_dim(dim) * 4;
  }
  LONGSPAN_HD int columns() const { return padded_dim(dim); }
  LONGSPAN_HD std::int64_t slot_bytes() const { return bytes(rows, dim); }
  LONGSPAN_HD Stats* stats(int slot) const {
    return reinterpret_cast<Stats*>(data + slot * slot_bytes());
  }
  LONGSPAN_HD float* o(int slot) const {
    return reinterpret_cast<float*>(data + slot * slot_bytes() + stats_bytes(rows));
  }
  LONGSPAN_HD float* o(int slot, std::int64_t row) const { return o(slot) + row * columns(); }
};

/// A strided array [tokens, heads] of fp32; of fp64 for products of fp64, whose kernels cast it.
struct LseView {
  float* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  LONGSPAN_HD float* at(std::int64_t row, std::int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
};

/// The lse of a batch, beside TokenRows.
struct TokenLse : LseView {
  SequenceGap gap;

  TokenLse() = default;
  LONGSPAN_HD TokenLse(float* memory, std::int64_t row, std::int64_t head, SequenceGap apart = {})
      : LseView{memory, row, head}, gap(apart) {}
  LONGSPAN_HD TokenLse(const LseView& lse) : LseView(lse) {}

  LONGSPAN_HD float* at(std::int64_t row, std::int64_t head) const {
    return LseView::at(row, head) + gap.before(row);
  }
};

}  // namespace longspan::kernels
