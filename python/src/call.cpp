#include "python/src/call.hpp"

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>

#include "longspan/error.hpp"

namespace longspan::python {
namespace {

std::string shape_text(const Tensor& t) {
  std::string made = "[";
  for (int d = 0; d < t.dims; ++d) made += (d > 0 ? ", " : "") + std::to_string(t.shape[d]);
  return made + "]";
}

/// [batch, tokens, heads, dim] <-> [batch, heads, tokens, dim]
Tensor exchanged(Tensor t) {
  if (t.dims != 4) return t;
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

/// Whether elements stand one behind the other. An extent of 1 is never stepped over.
bool is_dense(const Tensor& t) {
  std::int64_t step = 1;
  for (int d = t.dims - 1; d >= 0; --d) {
    if (t.shape[d] == 0) return true;
    if (t.shape[d] > 1 && t.stride[d] != step) return false;
    step *= t.shape[d];
  }
  return true;
}

/// Whether the library reads each row as it lies: its elements follow each other, and no dimension
/// runs backwards.
bool has_plain_rows(const Tensor& t) {
  if (t.size() == 0) return true;
  for (int d = 0; d < t.dims; ++d)
    if (t.stride[d] < 0) return false;
  return t.stride[t.dims - 1] == 1 || t.shape[t.dims - 1] == 1;
}

/// Whether the sequences of [batch, capacity, kv_heads, dim] are a whole number of keys apart.
bool is_cache(const Tensor& t) {
  return t.dims != 4 || t.size() == 0 || (t.stride[1] > 0 && t.stride[0] % t.stride[1] == 0);
}

/// Keys from one sequence to the next.
std::int64_t pitch_of(const Tensor& t) {
  return t.dims == 4 && t.size() > 0 ? t.stride[0] / t.stride[1] : 0;
}

/// Whether v is the first columns of k.
bool is_part_of(const Tensor& v, const Tensor& k) {
  return v.data == k.data && v.dtype == k.dtype && v.dims == k.dims &&
         std::equal(v.shape.begin(), v.shape.begin() + v.dims - 1, k.shape.begin()) &&
         std::equal(v.stride.begin(), v.stride.begin() + v.dims, k.stride.begin()) &&
         v.shape[v.dims - 1] <= k.shape[k.dims - 1];
}

/// A vector of lengths or starts that the host can read.
bool is_readable(const Tensor& t) {
  return t.device == Device::host && t.dims == 1 &&
         (t.dtype == DType::int32 || t.dtype == DType::int64);
}
std::int64_t entry(const Tensor& t, std::int64_t i) {
  return t.dtype == DType::int32 ? static_cast<const std::int32_t*>(t.data)[i * t.stride[0]]
                                 : static_cast<const std::int64_t*>(t.data)[i * t.stride[0]];
}

/// Rows that a rank has by a rule, of all sequences: `rows` are those of a packed batch, or of each
/// sequence. No value where only a GPU can read how many they are, or only the rank itself knows.
std::optional<std::int64_t> rows_of_rank(const Call& call, const Sharding& rule, std::int64_t rows,
                                         int rank, int ranks) {
  const Tensor &starts = call.cu_seqlens_q.tensor(), &ends = call.query_table.tensor();
  if (rule.layout == Layout::listed) return std::nullopt;
  if (rule.layout == Layout::ranges) {
    if (!is_readable(ends) || ends.shape[0] != std::int64_t{ranks} + 1) return std::nullopt;
    return std::max<std::int64_t>(0, entry(ends, std::int64_t{rank} + 1) - entry(ends, rank));
  }
  if (!call.cu_seqlens_q) return rule.resolve(rows, rank, ranks).local_len(rows) * call.batch();
  if (!is_readable(starts)) return std::nullopt;
  std::int64_t held = 0;
  for (std::int64_t b = 0; b + 1 < starts.shape[0]; ++b) {
    const std::int64_t length = std::max<std::int64_t>(0, entry(starts, b + 1) - entry(starts, b));
    held += rule.resolve(length, rank, ranks).local_len(length);
  }
  return held;
}

/// The most rows that a rank can have of sequences whose lengths only a GPU can read.
std::int64_t most_rows(const Call& call, const Sharding& rule, std::int64_t rows, int ranks) {
  const std::int64_t beyond_even = rule.layout == Layout::contiguous    ? 2 * kSegment
                                   : rule.layout == Layout::interleaved ? rule.block
                                                                        : 2;
  const std::int64_t sequences = std::max<std::int64_t>(0, call.cu_seqlens_q.tensor().shape[0] - 1);
  return std::min(rows, rows / ranks + sequences * beyond_even);
}

/// The rows that the rank gets of each sequence.
std::int64_t own_rows(const Call& call, const Sharding& rule, const Communicator& world) {
  if (rule.layout == Layout::listed && is_readable(call.query_table.tensor())) {
    const Tensor& table = call.query_table.tensor();
    std::int64_t count = 0;
    while (count < table.shape[0] && entry(table, count) >= 0) ++count;
    return count;
  }
  const auto rows = rows_of_rank(call, rule, call.tokens(), world.rank(), world.size());
  if (!rows)
    throw InputError(
        "out is missing: with results by rows, of sequences or by a table that lie on a GPU, how "
        "many rows this rank gets is not known here");
  return *rows / std::max<std::int64_t>(1, call.batch());
}

std::string text_of(const Sharding& rule) {
  std::string made = name(rule.layout);
  if (rule.layout == Layout::interleaved) made += ":" + std::to_string(rule.block);
  return made;
}

/// What a rank says where lengths are asked for.
struct Said {
  std::array<std::int64_t, 4> numbers;  // own keys, own rows, whole_keys, whole_queries
  std::string keys, queries, contradiction;

  std::string text() const {
    std::string made;
    for (const std::int64_t number : numbers) made += std::to_string(number) + "\n";
    return made + keys + "\n" + queries + "\n" + contradiction;
  }
  static Said of(const std::string& text) {
    Said said;
    std::size_t at = 0;
    const auto line = [&] {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      const std::string made = text.substr(at, end - at);
      at = std::min(end + 1, text.size());
      return made;
    };
    for (std::int64_t& number : said.numbers) {
      const std::string digits = line();
      std::from_chars(digits.data(), digits.data() + digits.size(), number);
    }
    said.keys = line();
    said.queries = line();
    said.contradiction = text.substr(at);
    return said;
  }
};

/// Throws what is wrong with what the ranks say, the same on every rank.
void check_said(const std::vector<Said>& all, int own) {
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].contradiction.empty())
      throw InputError((static_cast<int>(r) == own ? "" : "on rank " + std::to_string(r) + ": ") +
                       all[r].contradiction);
  for (std::size_t r = 1; r < all.size(); ++r)
    for (const auto& [name, field] : {std::pair{"keys", &Said::keys}, {"queries", &Said::queries}})
      if (all[r].*field != all[0].*field)
        throw UsageError(std::string("'") + name + "' differs between ranks: rank 0 has " +
                         all[0].*field + ", rank " + std::to_string(r) + " has " + all[r].*field +
                         ". Give every rank the same");
}

/// One of the two arrays that ranks have parts of.
struct Part {
  const char* array;  // "k"
  const char* what;   // "keys"
  const char* argument;
  const char* table;
  std::size_t own, whole;  // in Said::numbers
};
constexpr Part kKeys{"k", "keys", "keys", "key_table", 0, 2};
constexpr Part kRows{"q", "rows", "queries", "query_table", 1, 3};

/// What there is to do about parts in rank order by another cut than the contiguous rule's.
std::string other_ends(const Part& part, const std::string& ends) {
  return std::string(". The contiguous layout cuts at multiples of ") + std::to_string(kSegment) +
         ": longspan.shard does, or give " + part.argument + "='ranges' and " + part.table + "=" +
         ends;
}

/// Compares the ranks' parts with the rule; where they are in rank order by another cut, where each
/// begins.
std::vector<std::int64_t> ends_of(const std::vector<Said>& all, const Part& part,
                                  const Sharding& rule, std::int64_t total, bool any_parts) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::int64_t whole = all[r].numbers[part.whole];
    if (whole >= 0 && whole != total)
      throw InputError(std::string(part.array) + " of rank " + std::to_string(r) +
                       " was cut by longspan.shard from " + std::to_string(whole) + " " +
                       part.what + ", and all ranks together have " + std::to_string(total) +
                       ": every rank gives its part of the same array");
  }
  if (rule.layout == Layout::ranges || rule.layout == Layout::listed) return {};
  const int ranks = static_cast<int>(all.size());
  std::vector<std::int64_t> ends{0};
  int wrong = -1;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t found = all[static_cast<std::size_t>(r)].numbers[part.own];
    ends.push_back(ends.back() + found);
    if (wrong < 0 && found != rule.resolve(total, r, ranks).local_len(total)) wrong = r;
  }
  if (wrong < 0) return {};
  const bool in_order = rule.layout == Layout::contiguous;
  if (in_order && any_parts) return ends;
  std::string text = "[";
  for (const std::int64_t end : ends) text += (text.size() > 1 ? ", " : "") + std::to_string(end);
  throw InputError(
      std::string(part.array) + " has " +
      std::to_string(all[static_cast<std::size_t>(wrong)].numbers[part.own]) + " " + part.what +
      " on rank " + std::to_string(wrong) + ", of " + std::to_string(total) +
      " on all ranks; the layout '" + text_of(rule) + "' (" + part.argument + ") gives that rank " +
      std::to_string(rule.resolve(total, wrong, ranks).local_len(total)) +
      (in_order ? other_ends(part, text + "]")
                : std::string(": longspan.shard(") + part.array + ", ...) cuts it so"));
}

/// Compares this rank's keys with the rule where the caller says how many there are: parts that
/// cannot be those of the rule. Spare rows behind a rank's own keys are no fault.
void check_own_part(const Call& call, const Sharding& rule, const Communicator& world) {
  if (world.size() == 1 || call.total_keys < 0 || call.cache_seqlens || call.k_new ||
      call.k.tensor().dims != 3 || rule.layout == Layout::ranges || rule.layout == Layout::listed)
    return;
  const std::int64_t total = call.total_keys, found = call.k.tensor().shape[0],
                     share = rule.resolve(total, world.rank(), world.size()).local_len(total);
  const bool in_order = rule.layout == Layout::contiguous;
  if (found == share || !(in_order || found == total)) return;
  throw InputError("k has " + std::to_string(found) + " keys on rank " +
                   std::to_string(world.rank()) + ", and total_keys is " + std::to_string(total) +
                   "; the layout '" + text_of(rule) + "' (keys) gives that rank " +
                   std::to_string(share) +
                   (in_order ? other_ends(kKeys, "where each rank's begin") +
                                   ", or leave total_keys out, so that ranks are asked"
                             : ": every rank gives its own keys, as longspan.shard(k, ...) cuts "
                               "them"));
}

/// Sequence b of a batch.
Tensor sequence_of(Tensor t, std::int64_t b) {
  t.data =
      static_cast<char*>(t.data) + b * t.stride[0] * static_cast<std::int64_t>(size_of(t.dtype));
  for (int d = 1; d < t.dims; ++d) {
    t.shape[d - 1] = t.shape[d];
    t.stride[d - 1] = t.stride[d];
  }
  --t.dims;
  return t;
}

/// The same as a batch of one.
Tensor only(Tensor t, std::int64_t b) {
  if (!t) return t;
  t.data =
      static_cast<char*>(t.data) + b * t.stride[0] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[0] = 1;
  return t;
}

}  // namespace

std::int64_t count_of(nb::handle given, const char* name) {
  return given.is_none() ? -1 : small(integer(given, name), name);
}

Tensor flat(Tensor t, const char* name) {
  if (t.dims != 4) return t;
  if (t.shape[0] > 1 && t.shape[1] > 0 && t.stride[0] != t.shape[1] * t.stride[1])
    throw InputError(std::string(name) + " is " + shape_text(t) +
                     " and its sequences do not follow each other in memory; copy it");
  std::int64_t rows = 0;
  if (__builtin_mul_overflow(t.shape[0], t.shape[1], &rows))
    throw InputError(std::string(name) + " is " + shape_text(t) + ", more rows than 63 bits count");
  for (int d = 1; d < 3; ++d) {
    t.stride[d - 1] = t.stride[d];
    t.shape[d] = t.shape[d + 1];
  }
  t.shape[0] = rows;
  t.stride[2] = t.stride[3];
  t.dims = 3;
  return t;
}

void DenseCopies::take(Array& array, const char* name) {
  const Tensor& t = array.tensor();
  const std::string lies = std::string(name) + " is " + shape_text(t) +
                           " and cannot be read as it lies in memory: make it dense first";
  if (on_other_stream_ && t.device == Device::cuda)
    throw InputError(lies + ", on the stream that is given");
  nb::object dense;
  if (array.kind().name == Kind::torch) {
    dense = array.object().attr("contiguous")();
  } else {
    const nb::handle type(reinterpret_cast<PyObject*>(Py_TYPE(array.object().ptr())));
    std::string root = "numpy";
    if (array.kind().name != Kind::numpy) {
      root = nb::cast<std::string>(nb::object(type.attr("__module__")));
      root = root.substr(0, root.find('.'));
    }
    const nb::object library = nb::module_::import_(root.c_str());
    if (!nb::hasattr(library, "ascontiguousarray")) throw InputError(lies);
    dense = library.attr("ascontiguousarray")(array.object());
  }
  made_.push_back(dense);
  views_.emplace_back(dense, name);
  array.tensor() = views_.back().tensor();
}

void DenseCopies::take_unless_flat(Array& array, const char* name) {
  const Tensor& t = array.tensor();
  if (!array) return;
  const bool follow =
      t.dims != 4 || t.shape[0] <= 1 || t.shape[1] == 0 || t.stride[0] == t.shape[1] * t.stride[1];
  if (!follow || !has_plain_rows(t)) take(array, name);
}

Call::Call(const Given& g)
    : q(g.q, "q"),
      k(g.k, "k"),
      v(g.v, "v"),
      causal(PyBool_Check(g.causal.ptr()) ? nb::none() : nb::borrow(g.causal), "causal",
             DType::uint8),
      cu_seqlens_q(g.cu_seqlens_q, "cu_seqlens_q", DType::int32),
      cache_seqlens(g.cache_seqlens, "cache_seqlens", DType::int32),
      block_table(g.block_table, "block_table"),
      k_new(g.k_new, "k_new"),
      v_new(g.v_new, "v_new"),
      q_descale(g.q_descale, "q_descale", DType::fp32),
      k_descale(g.k_descale, "k_descale", DType::fp32),
      v_descale(g.v_descale, "v_descale", DType::fp32),
      out_scale(g.out_scale, "out_scale", DType::fp32),
      alibi_slopes(g.alibi_slopes, "alibi_slopes", DType::fp32),
      sinks(g.sinks, "sinks", DType::fp32),
      qq_bias(g.qq_bias, "qq_bias"),
      documents(g.documents, "documents", DType::int64),
      key_table(g.key_table, "key_table", DType::int64),
      query_table(g.query_table, "query_table", DType::int64),
      given_out(g.out, "out"),
      given_lse(g.lse, "lse"),
      total_keys(count_of(g.total_keys, "total_keys")),
      total_queries(count_of(g.total_queries, "total_queries")),
      whole_keys(count_of(g.whole_keys, "whole_keys")),
      whole_queries(count_of(g.whole_queries, "whole_queries")),
      contradiction(g.contradiction.is_none() ? "" : text(g.contradiction, "contradiction")),
      skip_decode(flag(g.skip_decode, "skip_decode")),
      return_lse(flag(g.return_lse, "return_lse")),
      copies_(g.stream) {
  const Tensor& rows = q.required().tensor();
  k.required();
  v.required();
  if (rows.dims != 3 && rows.dims != 4)
    throw InputError("q is " + shape_text(rows) +
                     "; [tokens, heads, head_dim] is wanted, or [batch, tokens, heads, head_dim]");
  const Tensor &keys = k.tensor(), &values = v.tensor();
  if (keys.dims < 3 || keys.dims > 5 || values.dims < 3)
    throw InputError("k is " + shape_text(keys) + " and v is " + shape_text(values) +
                     "; [keys, kv_heads, head_dim] is wanted, or [batch, capacity, kv_heads, "
                     "head_dim], or pages with a block_table");
  if (k_new) {
    k.writable();
    v.writable();
  }
  if (batched() && keys.dims == 4 && !block_table && keys.shape[0] != rows.shape[0])
    throw InputError("q is " + shape_text(rows) + " and k is " + shape_text(keys) +
                     ": the numbers of sequences differ");
  stream = stream_of(g.stream, q);
}

std::int64_t Call::own_keys() const {
  const Tensor& t = k.tensor();
  if (t.dims > 3 && block_table)
    throw InputError("cache_seqlens is missing: the length of each sequence in pages");
  return t.dims == 3 ? t.shape[0] : t.shape[1];
}

void Call::check_gpu(int gpu) const {
  if (gpu < 0) return;
  const std::pair<const Array*, const char*> all[] = {{&q, "q"},
                                                      {&k, "k"},
                                                      {&v, "v"},
                                                      {&causal, "causal"},
                                                      {&cu_seqlens_q, "cu_seqlens_q"},
                                                      {&cache_seqlens, "cache_seqlens"},
                                                      {&block_table, "block_table"},
                                                      {&k_new, "k_new"},
                                                      {&v_new, "v_new"},
                                                      {&q_descale, "q_descale"},
                                                      {&k_descale, "k_descale"},
                                                      {&v_descale, "v_descale"},
                                                      {&out_scale, "out_scale"},
                                                      {&alibi_slopes, "alibi_slopes"},
                                                      {&sinks, "sinks"},
                                                      {&qq_bias, "qq_bias"},
                                                      {&documents, "documents"},
                                                      {&key_table, "key_table"},
                                                      {&query_table, "query_table"},
                                                      {&given_out, "out"},
                                                      {&given_lse, "lse"}};
  for (const auto& [array, name] : all) require_gpu(*array, name, gpu);
}

void Call::make_readable(bool sharded_queries) {
  if (sharded_queries ? !is_dense(q.tensor()) : !has_plain_rows(q.tensor())) copies_.take(q, "q");
  copies_.take_unless_flat(k_new, "k_new");
  copies_.take_unless_flat(v_new, "v_new");
  if (block_table || k_new)
    return;  // pages have any strides, and a copy of what is written is lost
  const auto is_readable_as_keys = [](const Tensor& t) { return has_plain_rows(t) && is_cache(t); };
  const Tensor &keys = k.tensor(), &values = v.tensor();
  if (is_readable_as_keys(keys) && is_readable_as_keys(values) &&
      (keys.dims != values.dims || pitch_of(keys) == pitch_of(values)))
    return;
  const bool is_part = is_part_of(values, keys);
  if (!is_dense(keys)) copies_.take(k, "k");
  if (is_part) {
    const std::int64_t columns = values.shape[values.dims - 1];
    v.tensor() = k.tensor();
    v.tensor().shape[v.tensor().dims - 1] = columns;
  } else if (!is_dense(values)) {
    copies_.take(v, "v");
  }
}

void Call::make_results(const Options& options, const Communicator& world) {
  const DType dtype = options.dtypes.of_out();
  std::array<std::int64_t, 4> shape{};
  const Tensor& rows = q.tensor();
  std::copy_n(rows.shape.begin(), rows.dims, shape.begin());
  const auto dims = static_cast<std::size_t>(rows.dims);
  shape[dims - 1] = options.of_values();
  if (options.results.part == ResultPart::heads && options.heads >= world.size())
    shape[dims - 2] = result_heads(options.heads, world.rank(), world.size()).size();
  if (options.results.part == ResultPart::rows)
    shape[dims - 3] = given_out ? given_out.tensor().shape[given_out.tensor().dims > 3 ? 1 : 0]
                                : own_rows(*this, options.results.rows, world);
  out = result_of(given_out, q, {shape.data(), dims}, dtype);
  if (return_lse || given_lse) lse = result_of(given_lse, q, {shape.data(), dims - 1}, DType::fp32);
}

AttentionArgs Call::args() const {
  AttentionArgs a;
  a.q = exchanged(q.tensor());
  a.k = k.tensor();
  a.v = v.tensor();
  a.out = exchanged(out.tensor());
  if (return_lse || given_lse) a.lse = Lse::tokens_heads(lse.tensor());
  a.query_start = cu_seqlens_q.tensor();
  a.kv_len = cache_seqlens.tensor();
  a.block_table = block_table.tensor();
  a.key_table = key_table.tensor();
  a.query_table = query_table.tensor();
  a.new_k = flat(k_new.tensor(), "k_new");
  a.new_v = flat(v_new.tensor(), "v_new");
  a.q_scale = q_descale.tensor();
  a.k_scale = k_descale.tensor();
  a.v_scale = v_descale.tensor();
  a.out_scale = out_scale.tensor();
  a.sinks = sinks.tensor();
  a.slopes = alibi_slopes.tensor();
  a.qq_bias = qq_bias.tensor();
  a.causal = causal.tensor();
  a.documents = documents.tensor();
  a.skip_decode = skip_decode;
  return a;
}

AttentionArgs Call::args_of(std::int64_t sequence) const {
  AttentionArgs a = args();
  if (k.tensor().dims == 3)
    throw InputError("k is " + shape_text(k.tensor()) + ", and q " + shape_text(q.tensor()) +
                     ": k of a batch whose rows are dealt out in parts of any lengths is [batch, "
                     "capacity, kv_heads, head_dim], or pages");
  a.q = sequence_of(q.tensor(), sequence);
  a.out = sequence_of(out.tensor(), sequence);
  if (a.lse) a.lse = Lse::tokens_heads(sequence_of(lse.tensor(), sequence));
  if (!block_table) {
    a.k = sequence_of(k.tensor(), sequence);
    a.v = sequence_of(v.tensor(), sequence);
  }
  for (const auto& [new_rows, to] : {std::pair{&k_new, &a.new_k}, std::pair{&v_new, &a.new_v}})
    if (new_rows->tensor().dims == 4) *to = sequence_of(new_rows->tensor(), sequence);
  for (Tensor* of_batch : {&a.kv_len, &a.block_table, &a.causal})
    *of_batch = only(*of_batch, sequence);
  if (a.key_table.dims == 2) a.key_table = only(a.key_table, sequence);
  return a;
}

nb::object Call::finish() {
  nb::object made = out.finish();
  if (!return_lse) return made;
  return nb::make_tuple(made, lse.finish());
}

Totals totals_of(const Communicator& world, const Call& call, const Options& options,
                 bool any_parts) {
  Totals totals{call.total_keys, call.total_queries};
  const bool sharded = options.queries.has_value(),
             ask_keys = totals.keys < 0 && !call.cache_seqlens;
  const int ranks = world.size();
  bool ask = ask_keys || (sharded && totals.queries < 0);
  if (sharded && totals.queries >= 0) {
    for (int r = 0; r < ranks && any_parts; ++r) {
      const auto rows = rows_of_rank(call, *options.queries, totals.queries, r, ranks);
      const bool by_table =
          options.queries->layout == Layout::ranges || options.queries->layout == Layout::listed;
      ask = ask || (!rows && by_table);
      totals.most_queries =
          std::max(totals.most_queries,
                   rows       ? *rows
                   : by_table ? 0
                              : most_rows(call, *options.queries, totals.queries, ranks));
    }
  }
  if (ranks == 1 || !ask) {
    if (!call.contradiction.empty()) throw InputError(call.contradiction);
    check_own_part(call, options.keys, world);
    if (ask_keys) totals.keys = call.own_keys();
    if (sharded && totals.queries < 0) totals.queries = call.tokens();
    if (ranks == 1) totals.most_queries = call.tokens() * call.batch();
    return totals;
  }
  const Said own{
      {ask_keys ? call.own_keys() : 0, call.tokens(), call.whole_keys, call.whole_queries},
      text_of(options.keys),
      sharded ? text_of(*options.queries) : "None",
      call.contradiction};
  std::vector<Said> all;
  for (const std::string& text : world.gather(own.text(), "count of keys and query rows"))
    all.push_back(Said::of(text));
  check_said(all, world.rank());
  std::int64_t keys = 0, rows = 0;
  for (const Said& said : all) {
    keys += said.numbers[0];
    rows += said.numbers[1];
    totals.most_queries = std::max(totals.most_queries, said.numbers[1] * call.batch());
  }
  if (ask_keys) {
    totals.keys = keys;
    totals.key_ends = ends_of(all, kKeys, options.keys, keys, any_parts);
  } else {
    check_own_part(call, options.keys, world);
  }
  if (sharded && totals.queries < 0) {
    totals.queries = rows;
    if (!call.cu_seqlens_q)
      totals.query_ends = ends_of(all, kRows, *options.queries, rows, any_parts);
  }
  return totals;
}

std::vector<std::int64_t> listed_rows(const Call& call, std::int64_t rows, std::int64_t entries) {
  const Tensor& table = call.query_table.tensor();
  if (table.dims != 1 || table.dtype != DType::int64)
    throw InputError("query_table is " + shape_text(table) + " of " + dtype_name(table.dtype) +
                     "; a vector of int64 is wanted, the position of each row");
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < table.shape[0]; ++i)
    if (i < rows || entry(table, i) != -1) values.push_back(entry(table, i));
  if (static_cast<std::int64_t>(values.size()) != rows)
    throw InputError("query_table has " + std::to_string(values.size()) +
                     " positions; this rank has " + std::to_string(rows) +
                     " rows, and past them stands -1");
  values.resize(static_cast<std::size_t>(entries), -1);
  return values;
}

void set_lengths(AttentionArgs& args, const Call& call, const Totals& totals, bool sharded_queries,
                 std::int64_t batch, Device device, UniformArrays& arrays) {
  const std::int64_t rows = sharded_queries ? totals.queries : call.tokens();
  if (batch > 1 && !args.query_start) args.query_start = arrays.steps(device, batch + 1, rows);
  if (!args.kv_len) {
    if (batch > 1)
      args.kv_len = arrays.constant(device, batch, totals.keys);
    else
      args.total_keys = totals.keys;
  } else if (call.total_keys >= 0) {
    throw InputError("total_keys and cache_seqlens are given; lengths stand in one of them");
  }
  if (sharded_queries)
    args.total_tokens = rows * (call.batched() && call.cu_seqlens_q.tensor().dims == 0 ? batch : 1);
}

}  // namespace longspan::python
