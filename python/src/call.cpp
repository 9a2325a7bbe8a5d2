#include "python/src/call.hpp"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "longspan/error.hpp"
#include "python/src/lengths.hpp"

namespace longspan::python {
namespace {

/// Whether elements are contiguous. An extent of 1 is never stepped over.
bool is_dense(const Tensor& t) {
  std::int64_t step = 1;
  for (int d = t.dims - 1; d >= 0; --d) {
    if (t.shape[d] == 0) return true;
    if (t.shape[d] > 1 && t.stride[d] != step) return false;
    step *= t.shape[d];
  }
  return true;
}

/// Whether the library reads each row in place: its elements follow each other, and no dimension
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
  return t.dims == 4 && t.size() > 0 && t.stride[1] > 0 ? t.stride[0] / t.stride[1] : 0;
}

/// Whether v is the first columns of k.
bool is_part_of(const Tensor& v, const Tensor& k) {
  return v.data == k.data && v.dtype == k.dtype && v.dims == k.dims &&
         std::equal(v.shape.begin(), v.shape.begin() + v.dims - 1, k.shape.begin()) &&
         std::equal(v.stride.begin(), v.stride.begin() + v.dims, k.stride.begin()) &&
         v.shape[v.dims - 1] <= k.shape[k.dims - 1];
}

/// [batch, tokens, ...], with `batched` queries, as [batch * tokens, ...].
Tensor rows_of_batch(Tensor t, bool batched, const char* name) {
  if (!batched || t.dims < 2) return t;
  if (t.shape[0] > 1 && t.shape[1] > 0 && t.stride[0] != t.shape[1] * t.stride[1])
    throw InputError(std::string(name) + " is " + shape_text(t) +
                     " and its sequences do not follow each other in memory; copy it");
  std::int64_t rows = 0;
  if (__builtin_mul_overflow(t.shape[0], t.shape[1], &rows))
    throw InputError(std::string(name) + " is " + shape_text(t) + ", more rows than 63 bits count");
  for (int d = 1; d < t.dims; ++d) {
    t.stride[d - 1] = t.stride[d];
    t.shape[d - 1] = t.shape[d];
  }
  t.shape[0] = rows;
  --t.dims;
  return t;
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

Tensor exchanged(Tensor t) {
  if (t.dims != 4) return t;
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

void become_table(Array& array, const Tensor& cache, std::int64_t sequences, bool writes) {
  Tensor& rows = array.tensor();
  if (cache.dims != 4)
    throw InputError("cache_batch_idx is given and k is " + shape_text(cache) +
                     "; a cache [rows, capacity, kv_heads, head_dim] is wanted");
  if (rows.dims != 1 || rows.shape[0] != sequences)
    throw InputError("cache_batch_idx is " + shape_text(rows) + "; [" + std::to_string(sequences) +
                     "] is wanted, the row of the cache of each sequence");
  const auto entry = [&](std::int64_t b) {
    return static_cast<const std::int32_t*>(rows.data)[b * rows.stride[0]];
  };
  std::vector<std::int64_t> taken;  // by the sequence whose new keys go to a row
  if (rows.device == Device::host && writes)
    taken.assign(static_cast<std::size_t>(cache.shape[0]), -1);
  for (std::int64_t b = 0; b < sequences && rows.device == Device::host; ++b) {
    const std::int32_t row = entry(b);
    if (row < 0 || row >= cache.shape[0])
      throw InputError("cache_batch_idx[" + std::to_string(b) + "] is " + std::to_string(row) +
                       "; the cache has " + std::to_string(cache.shape[0]) + " rows");
    if (!writes) continue;
    std::int64_t& owner = taken[static_cast<std::size_t>(row)];
    if (owner >= 0)
      throw InputError("cache_batch_idx is " + std::to_string(row) + " for the sequences " +
                       std::to_string(owner) + " and " + std::to_string(b) +
                       ", whose new keys would go to the same places");
    owner = b;
  }
  rows.dims = 2;
  rows.shape[1] = 1;
  rows.stride[1] = 1;
}

std::string shape_text(const Tensor& t) {
  std::string made = "[";
  for (int d = 0; d < t.dims; ++d) made += (d > 0 ? ", " : "") + std::to_string(t.shape[d]);
  return made + "]";
}

std::int64_t count_of(nb::handle given, const char* name) {
  return given.is_none() ? -1 : small(integer(given, name), name);
}

Tensor flat(Tensor t, const char* name) { return rows_of_batch(t, t.dims == 4, name); }

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
  views_.emplace_back(dense, name, Array::Wide());  // of a type that was checked
  array.tensor() = views_.back().tensor();
}

void DenseCopies::take_unless_flat(Array& array, const char* name) {
  const Tensor& t = array.tensor();
  if (!array) return;
  const bool follow =
      t.dims != 4 || t.shape[0] <= 1 || t.shape[1] == 0 || t.stride[0] == t.shape[1] * t.stride[1];
  if (!follow || !has_plain_rows(t)) take(array, name);
}

void DenseCopies::take_unless_cache(Array& k, Array& v) {
  const auto is_readable = [](const Array& array) {
    return !array || (has_plain_rows(array.tensor()) && is_cache(array.tensor()));
  };
  const Tensor keys = k.tensor(), values = v.tensor();
  const bool alike = !k || !v || keys.dims != values.dims || pitch_of(keys) == pitch_of(values);
  if (is_readable(k) && is_readable(v) && alike) return;
  if (k && !is_dense(keys)) take(k, "k");
  if (k && v && is_part_of(values, keys)) {
    v.tensor() = k.tensor();
    v.tensor().shape[values.dims - 1] = values.shape[values.dims - 1];
  } else if (v && !is_dense(values)) {
    take(v, "v");
  }
}

void DenseCopies::take_unless_plain(Array& array, const char* name) {
  if (!has_plain_rows(array.tensor())) take(array, name);
}

AttendCall::AttendCall(const Arguments<kRun>& given)
    : q(Array::wide(given.get<"q">())),
      stream(stream_of(given.get<"stream">(), q.required())),
      k(Array::wide(given.get<"k">())),
      v(Array::wide(given.get<"v">())),
      causal(flags_of(given.get<"causal">()), "causal", DType::uint8, stream),
      cu_seqlens_q(given.get<"cu_seqlens_q">(), DType::int32, stream),
      cache_seqlens(given.get<"cache_seqlens">(), DType::int32, stream),
      block_table(given.get<"cache_batch_idx">().is_none()
                      ? Array::table(given.get<"block_table">(), stream)
                      : Array(given.get<"cache_batch_idx">(), DType::int32, stream)),
      cu_seqlens_k_new(given.get<"cu_seqlens_k_new">(), DType::int32, stream),
      k_new(Array::wide(given.get<"k_new">())),
      v_new(Array::wide(given.get<"v_new">())),
      q_descale(given.get<"q_descale">(), DType::fp32),
      k_descale(given.get<"k_descale">(), DType::fp32),
      v_descale(given.get<"v_descale">(), DType::fp32),
      out_scale(given.get<"out_scale">(), DType::fp32),
      alibi_slopes(given.get<"alibi_slopes">(), DType::fp32),
      sinks(given.get<"sinks">(), DType::fp32),
      qq_bias(given.get<"qq_bias">()),
      documents(given.get<"documents">(), DType::int64, stream),
      bidirectional(given.get<"bidirectional">(), DType::int64, stream),
      prefix_lens(given.get<"prefix_lens">(), DType::int32, stream),
      cache_leftpad(given.get<"cache_leftpad">(), DType::int32, stream),
      seqused_q(given.get<"seqused_q">(), DType::int32, stream),
      indices(given.get<"indices">(), DType::int32, stream),
      topk_length(given.get<"topk_length">(), DType::int32, stream),
      rotary_cos(given.get<"rotary_cos">()),
      rotary_sin(given.get<"rotary_sin">()),
      key_table(given.get<"key_table">(), DType::int64, stream),
      query_table(given.get<"query_table">(), DType::int64, stream),
      dropout_seed(given.get<"dropout_seed">(), DType::int64, stream),
      dropout_sequences(given.get<"dropout_sequences">(), DType::int32, stream),
      given_out(Array::wide(given.get<"out">())),
      given_lse(Array::wide(given.get<"lse">())),
      total_keys(count_of(given.get<"total_keys">())),
      total_queries(count_of(given.get<"total_queries">())),
      whole_keys(count_of(given.get<"whole_keys">())),
      whole_queries(count_of(given.get<"whole_queries">())),
      skip_decode(flag(given.get<"skip_decode">())),
      return_lse(flag(given.get<"return_lse">())),
      copies_(given.get<"stream">()) {
  if (const auto message = given.get<"contradiction">(); !message.is_none())
    contradiction = text(message);
  const Tensor& rows = q.tensor();
  for (const Array& array : {std::cref(q), std::cref(k), std::cref(v)}) array.required();
  q.floats();
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
  } else if (cu_seqlens_k_new) {
    throw InputError("cu_seqlens_k_new is given, and k_new is None: it is where its rows begin");
  }
  if (!given.get<"cache_batch_idx">().is_none()) {
    if (!given.get<"block_table">().is_none())
      throw InputError(
          "cache_batch_idx and block_table are given; one of them says where the keys of a "
          "sequence lie");
    by_rows_of_cache = true;
    const Tensor &lengths = cache_seqlens.tensor(), &starts = cu_seqlens_q.tensor();
    become_table(block_table, keys,
                 batched()           ? batch()
                 : lengths.dims == 1 ? lengths.shape[0]
                 : starts.dims == 1  ? starts.shape[0] - 1
                                     : 1,
                 static_cast<bool>(k_new));
  }
  const bool may_be_pages = static_cast<bool>(indices);  // of which indices name rows
  if (batched() && keys.dims == 4 && !block_table && !may_be_pages &&
      keys.shape[0] != rows.shape[0])
    throw InputError("q is " + shape_text(rows) + " and k is " + shape_text(keys) +
                     ": the numbers of sequences differ");
  if (batched() && batch() == 0) leave_out_sequences();
}

void AttendCall::check_types(DType kv) const {
  if (is_latent_row(kv)) return;  // the library says what is wrong
  k.floats();
  v.floats();
}

void AttendCall::leave_out_sequences() {
  Tensor &keys = k.tensor(), &values = v.tensor();
  const bool are_bytes = keys.dtype == DType::uint8;
  const std::int64_t heads = kv_heads(), columns = value_dim(),
                     dim = are_bytes ? keys.shape[keys.dims - 1] : head_dim();
  keys = {keys.data, keys.dtype, {0, heads, dim}, keys.device};
  values = {values.data, values.dtype, {0, heads, columns}, values.device};
  for (Array* array : {&causal, &cu_seqlens_q, &cache_seqlens, &block_table, &cu_seqlens_k_new,
                       &k_new, &v_new, &documents, &bidirectional, &prefix_lens, &cache_leftpad,
                       &seqused_q, &indices, &topk_length})
    array->leave_out();
  // Scales and slopes of no sequence: nothing is multiplied by them, but fp8 has a scale.
  if (alibi_slopes.tensor().dims == 2) alibi_slopes.leave_out();
  static float one = 1.0f;
  for (Array* array : {&q_descale, &k_descale, &v_descale}) {
    const Tensor& scale = array->tensor();
    if (scale.dims != 2) continue;
    void* const data = scale.device == Device::host ? &one : scale.data;
    array->tensor() = Tensor(data, DType::fp32, {1}, scale.device);
  }
  total_keys = 0;
}

std::int64_t AttendCall::own_keys() const {
  const Tensor& t = k.tensor();
  if (t.dims > 3 && block_table && !by_rows_of_cache)
    throw InputError("cache_seqlens is missing: the length of each sequence in pages");
  return t.dims == 3 ? t.shape[0] : t.shape[1];
}

void AttendCall::check_gpu(int gpu) const {
  if (gpu < 0) return;
  const std::pair<const Array*, const char*> all[] = {{&q, "q"},
                                                      {&k, "k"},
                                                      {&v, "v"},
                                                      {&causal, "causal"},
                                                      {&cu_seqlens_q, "cu_seqlens_q"},
                                                      {&cache_seqlens, "cache_seqlens"},
                                                      {&block_table, "block_table"},
                                                      {&cu_seqlens_k_new, "cu_seqlens_k_new"},
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
                                                      {&bidirectional, "bidirectional"},
                                                      {&prefix_lens, "prefix_lens"},
                                                      {&cache_leftpad, "cache_leftpad"},
                                                      {&seqused_q, "seqused_q"},
                                                      {&indices, "indices"},
                                                      {&topk_length, "topk_length"},
                                                      {&rotary_cos, "rotary_cos"},
                                                      {&rotary_sin, "rotary_sin"},
                                                      {&key_table, "key_table"},
                                                      {&query_table, "query_table"},
                                                      {&given_out, "out"},
                                                      {&given_lse, "lse"}};
  for (const auto& [array, name] : all) require_gpu(*array, name, gpu);
}

void AttendCall::make_readable(bool sharded_queries) {
  if (sharded_queries ? !is_dense(q.tensor()) : !has_plain_rows(q.tensor())) copies_.take(q, "q");
  copies_.take_unless_flat(rotary_cos, "rotary_cos");
  copies_.take_unless_flat(rotary_sin, "rotary_sin");
  copies_.take_unless_flat(k_new, "k_new");
  copies_.take_unless_flat(v_new, "v_new");
  // Pages may have any strides, and writes to a copy would be lost.
  if (!block_table && !k_new) copies_.take_unless_cache(k, v);
}

void AttendCall::make_results(const Options& options, const Communicator& world) {
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
  if (return_lse || given_lse)
    lse = result_of(given_lse, q, {shape.data(), dims - 1}, options.dtypes.of_lse());
}

bool AttendCall::appends_ahead(std::int64_t rows) const {
  if (!k_new) return false;
  const Tensor& fresh = k_new.tensor();
  const std::int64_t found = fresh.dims == 4 ? fresh.shape[0] * fresh.shape[1] : fresh.shape[0];
  return cu_seqlens_k_new || found != rows * batch() || (fresh.dims == 4 && cu_seqlens_q);
}

Append AttendCall::append_of(AttentionArgs& run, std::int64_t batch, Device device,
                             UniformArrays& arrays) const {
  Append made{.new_k = run.new_k,
              .new_v = run.new_v,
              .k = run.k,
              .v = run.v,
              .total_keys = run.total_keys,
              .query_start = cu_seqlens_k_new.tensor(),
              .kv_len = run.kv_len,
              .block_table = run.block_table,
              .key_table = run.key_table,
              .k_scale = run.k_scale,
              .v_scale = run.v_scale,
              .rope_cos = run.rope_cos,
              .rope_sin = run.rope_sin};
  const Tensor& fresh = k_new.tensor();
  const std::int64_t sequences = made.kv_len ? made.kv_len.shape[0] : batch;
  if (sequences > 1 && !made.query_start) {
    if (fresh.dims != 4)
      throw InputError("k_new has " + std::to_string(fresh.shape[0]) +
                       " rows, other than q: cu_seqlens_k_new is wanted, where those of each "
                       "sequence begin");
    made.query_start = arrays.steps(device, sequences + 1, fresh.shape[1]);
  }
  run.new_k = run.new_v = {};
  return made;
}

AttentionArgs AttendCall::args() const {
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
  a.bidirectional = bidirectional.tensor();
  a.prefix_len = prefix_lens.tensor();
  a.left_padding = cache_leftpad.tensor();
  a.query_len = seqused_q.tensor();
  a.indices = rows_of_batch(indices.tensor(), batched(), "indices");
  a.index_len = rows_of_batch(topk_length.tensor(), batched(), "topk_length");
  a.rope_cos = rotary_cos.tensor();
  a.rope_sin = rotary_sin.tensor();
  a.skip_decode = skip_decode;
  a.dropout_seed = dropout_seed.tensor();
  a.dropout_sequences = dropout_sequences.tensor();
  return a;
}

AttentionArgs AttendCall::args_of_backward() const {
  AttentionArgs a = args();
  a.out = exchanged(given_out.required().tensor());
  a.lse = Lse::tokens_heads(given_lse.required().tensor());
  return a;
}

AttentionArgs AttendCall::args_of(std::int64_t sequence) const {
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
  if (a.documents.dims == 1 && batch() > 1)
    throw InputError("documents is " + shape_text(a.documents) + "; the batch has " +
                     std::to_string(batch()) + " sequences: [batch, count + 1] is wanted");
  if (a.bidirectional.dims == 2 && batch() > 1)
    throw InputError("bidirectional is " + shape_text(a.bidirectional) + "; the batch has " +
                     std::to_string(batch()) + " sequences: [batch, count, 2] is wanted");
  for (Tensor* of_batch : {&a.kv_len, &a.block_table, &a.causal, &a.documents, &a.bidirectional,
                           &a.prefix_len, &a.left_padding, &a.query_len, &a.dropout_sequences})
    *of_batch = only(*of_batch, sequence);
  for (Tensor* factors : {&a.q_scale, &a.k_scale, &a.v_scale, &a.slopes})
    if (factors->dims == 2) *factors = only(*factors, sequence);
  if (a.key_table.dims == 2) a.key_table = only(a.key_table, sequence);
  return a;
}

nb::object AttendCall::finish() {
  nb::object made = out.finish();
  if (!return_lse) return made;
  return nb::make_tuple(made, lse.finish());
}

}  // namespace longspan::python
