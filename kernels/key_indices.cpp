#include "kernels/key_indices.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::kernels {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

std::size_t aligned(std::int64_t bytes) {
  return static_cast<std::size_t>((bytes + 255) / 256 * 256);
}

/// The bytes of entries, counts and starts.
struct ListBytes {
  std::size_t entries, counts, starts;

  explicit ListBytes(const AttendParams& p) {
    const std::int64_t lists = p.tokens * p.indices.heads;
    entries = aligned(lists * p.indices.top_k * 4);
    counts = aligned(lists * 4);
    starts = aligned((lists + 1) * 4);
  }
  std::size_t total() const { return entries + counts + starts; }
};

void refuse(bool asked, const char* what, const char* instead) {
  if (asked) throw Unsupported(std::string(what) + " with indices is not supported: " + instead);
}

/// Where rows of a cache lie, in steps of `unit` elements from its start.
struct Steps {
  std::int64_t unit, page, row, head;

  bool operator==(const Steps& other) const {
    return page == other.page && row == other.row && head == other.head;
  }
};

/// A dimension of one place has any stride.
Steps steps_of(const AttendParams& p, const KvRows& rows) {
  const std::int64_t page = p.pages.count > 1 ? rows.page_stride : 0;
  const std::int64_t row = rows.page_stride == 0 || p.pages.size > 1 ? rows.row_stride : 0;
  const std::int64_t head = p.indices.heads > 1 ? rows.head_stride : 0;
  if (page < 0 || row < 0 || head < 0)
    throw Unsupported("a cache with negative strides with indices is not supported: make it dense");
  const std::int64_t common = std::gcd(std::gcd(page, row), head), unit = common > 0 ? common : 1;
  return {unit, page / unit, row / unit, head / unit};
}

Steps steps_of(const AttendParams& p) {
  const Steps k = steps_of(p, p.k), v = steps_of(p, p.v);
  if (!(k == v))
    throw Unsupported(
        "indices over keys and values whose rows lie at strides of different proportions are not "
        "supported: pages, rows and heads lie at " +
        std::to_string(k.page) + ", " + std::to_string(k.row) + ", " + std::to_string(k.head) +
        " steps in k and at " + std::to_string(v.page) + ", " + std::to_string(v.row) + ", " +
        std::to_string(v.head) + " in v; give both in rows of one form (not x-packed)");
  const bool paged = p.k.page_stride != 0;
  const std::int64_t last_page = paged ? std::max<std::int64_t>(p.pages.count, 1) - 1 : 0;
  const std::int64_t last_row = (paged ? std::int64_t{p.pages.size} : p.indices.slots) - 1;
  const double most = static_cast<double>(last_page) * static_cast<double>(k.page) +
                      static_cast<double>(last_row) * static_cast<double>(k.row) +
                      static_cast<double>((p.indices.heads - 1) * k.head);
  if (most > static_cast<double>(kMost))
    throw Unsupported(
        "indices over a cache of " + std::to_string(p.indices.slots) +
        " rows with these strides are not supported: places are 32 bits; a cache with "
        "fewer pages, or dense pages, has fewer");
  return k;
}

/// q with a list for each kv head: rows of a kv head are rows of the batch.
TokenRows rows_of_kv_heads(const AttendParams& p) {
  const std::int64_t group = p.heads / p.kv_heads, step = group * p.q.head_stride;
  if (p.q.gap.rows != 0 || (p.tokens > 1 && p.q.row_stride != p.kv_heads * step))
    throw Unsupported(
        "indices for each kv head with a q whose rows have gaps are not supported: make q dense, "
        "[tokens, heads, head_dim]");
  return {p.q.data, step, p.q.head_stride};
}

}  // namespace

void check_indices(const AttendParams& p) {
  const Mask& mask = p.mask;
  refuse(mask.causal || mask.window > 0 || mask.right >= 0 || mask.chunk > 0 || mask.prefix > 0 ||
             p.batch.causal != nullptr || p.ranges,
         "a mask (causal, window, chunks, prefix, ranges)",
         "leave out the indices of keys that a row must not see");
  refuse(static_cast<bool>(p.documents), "documents",
         "leave out the indices of keys of other documents");
  refuse(static_cast<bool>(p.bias), "a bias by position (ALiBi, qq_bias)", "leave it off");
  refuse(static_cast<bool>(p.dropout), "dropout", "make the layer without dropout.p");
  refuse(p.invariant, "invariant",
         "states fold in the order of the indices, and ranks have parts of them; results still "
         "repeat their bits on the same ranks");
  refuse(p.dtype == DType::fp64, "fp64", "take products of fp32");
  refuse(p.queries.ranks > 1, "a share of the query rows",
         "give every rank all the queries and their indices (Options::results has the parts of the "
         "result)");
  refuse(p.shard.layout == Layout::listed && !p.indices.are_slots, "listed keys",
         "give the rows of each rank's own cache (slots), or distribute keys by a rule or ranges");
  refuse(row_format_of(p.kv_dtype).apart > 0, "rows whose scales lie apart in their page",
         "give rows that hold their scales");
  refuse(p.batch.skip_decode, "skip_decode", "give the rows of other sequences only");
  refuse(static_cast<bool>(p.parts), "segments handed out", "take states (attend_state)");
  refuse(static_cast<bool>(p.spans) || p.arrivals != nullptr, "keys that travel",
         "take gather-states or scatter-states");
  for (const ScaleView* scales : {&p.q_scale, &p.k_scale, &p.v_scale}) {
    refuse(scales->sequence_stride != 0, "scales of each sequence",
           "give one scale, or one of each kv head");
    refuse(p.indices.heads > 1 && scales->head_stride != 0 && scales->data != nullptr,
           "indices for each kv head and scales of each kv head", "give one scale of the tensor");
  }
}

std::size_t compact_bytes(const AttendParams& p) { return ListBytes(p).total(); }

AttendParams attention_of_lists(const AttendParams& bounds) {
  AttendParams p = bounds;
  const int heads = bounds.indices.heads;
  const std::int64_t lists = bounds.tokens * heads;
  if (lists > kMost)
    throw Unsupported(
        "indices of " + std::to_string(bounds.tokens) + " rows and " + std::to_string(heads) +
        " kv heads are not supported: " + "at most 2^31 - 1 lists in one call; give fewer rows");
  p.indices = {};
  p.tokens = lists;
  p.heads = bounds.heads / heads;
  p.kv_heads = bounds.kv_heads / heads;
  p.batch = {};
  p.batch.size = static_cast<int>(lists);
  p.shard = {};
  p.queries = {};
  p.rope = {};
  p.max_kv_len = bounds.indices.top_k;
  p.max_query_len = 1;
  p.new_k = p.new_v = {};
  return p;
}

SparseAttention sparse_attention(const AttendParams& p) {
  const ListBytes bytes(p);
  if (p.scratch_bytes < bytes.total())
    throw InputError("attend by indices needs more than " + std::to_string(bytes.total()) +
                     " bytes of scratch and was given " + std::to_string(p.scratch_bytes) +
                     ": plan for these rows and indices");
  const Steps steps = steps_of(p);
  SparseAttention s;
  CompactParams& c = s.compact;
  c.indices = p.indices;
  c.tokens = p.tokens;
  c.batch = p.batch;
  c.shard = p.shard;
  c.pages = p.pages;
  c.in_pages = p.k.page_stride != 0;
  c.page_step = steps.page;
  c.row_step = steps.row;
  c.head_step = steps.head;
  c.entries = reinterpret_cast<std::int32_t*>(p.scratch);
  c.counts = reinterpret_cast<std::int32_t*>(p.scratch + bytes.entries);
  c.starts = reinterpret_cast<std::int32_t*>(p.scratch + bytes.entries + bytes.counts);

  AttendParams& a = s.attend = attention_of_lists(p);
  a.scratch += bytes.total();
  a.scratch_bytes -= bytes.total();
  a.batch.query_start = c.starts;
  a.batch.kv_len = c.counts;
  a.pages = {c.entries, p.indices.top_k, 1, p.indices.top_k, kMost, 1};
  if (p.indices.heads > 1) a.q = rows_of_kv_heads(p);
  for (const auto& [to, from] : {std::pair{&a.k, &p.k}, std::pair{&a.v, &p.v}}) {
    to->page_stride = steps_of(p, *from).unit;
    if (p.indices.heads > 1) to->head_stride = to->page_stride;
  }
  return s;
}

}  // namespace longspan::kernels
