#include "launcher/problem/problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "launcher/judge/nans.hpp"
#include "launcher/judge/oracle.hpp"
#include "launcher/problem/memory.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

template <class T>
std::vector<T> starts(const std::vector<std::int32_t>& lengths) {
  std::vector<T> start(lengths.size() + 1);
  std::partial_sum(lengths.begin(), lengths.end(), start.begin() + 1, std::plus<T>());
  return start;
}

/// Lists the rows of the whole q that a rank holds, in its order.
std::vector<std::int64_t> rows_on(const Problem& problem, int rank, int ranks) {
  std::vector<std::int64_t> rows;
  if (!problem.queries) {
    rows.resize(problem.tokens());
    std::iota(rows.begin(), rows.end(), std::int64_t{0});
    return rows;
  }
  const auto start = problem.query_start();
  for (int b = 0; b < problem.batch(); ++b) {
    const std::int64_t length = problem.q_lens[b];
    const Shard shard = problem.queries->on(rank, ranks, length);
    for (std::int64_t i = 0; i < shard.local_len(length); ++i)
      rows.push_back(start[b] + shard.position(i, length));
  }
  return rows;
}

/// A key that a rank holds: its number in the whole k, and its place in the rank's memory.
struct OwnKey {
  std::int64_t number, slot;
};

/// Lists the keys of a rank in the order of its memory, which has no pages.
std::vector<OwnKey> keys_on(const Problem& problem, const Shard& shard) {
  std::vector<OwnKey> keys;
  const auto start = problem.key_start();
  for (int b = 0; b < problem.batch(); ++b) {
    const std::int64_t length = problem.kv_lens[b];
    const std::int64_t first = problem.capacity > 0 ? b * problem.capacity : std::ssize(keys);
    for (std::int64_t i = 0; i < shard.local_len(length); ++i)
      keys.push_back({start[b] + shard.position(i, length), first + i});
  }
  return keys;
}

/// The elements in a chunk of x-packed keys: 16 bytes, or less where they do not divide the dim.
std::int64_t chunk_of(DType dtype, int dim) {
  int chunk = storage_of(dtype).elements(16);
  while (dim % chunk != 0) chunk /= 2;
  return chunk;
}

/// The finaliser of splitmix64: every bit of the input moves about half of the output's.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

RunSize Problem::run_size(int ranks) const {
  RunSize size{.tokens = static_cast<double>(tokens()),
               .keys = static_cast<double>(key_start().back()),
               .sequences = static_cast<double>(batch())};
  for (int rank = 0; queries && rank < ranks; ++rank) {
    double rows = 0;
    for (const std::int64_t length : q_lens)
      rows += static_cast<double>(queries->on(rank, ranks, length).local_len(length));
    size.most_tokens = std::max(size.most_tokens, rows);
  }
  const auto differ = [](const std::vector<std::int32_t>& lengths) {
    return std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) !=
           lengths.end();
  };
  if (differ(q_lens) || differ(kv_lens))
    for (int b = 0; b < batch(); ++b) size.each.push_back({q_lens[b], kv_lens[b]});
  return size;
}

bool Problem::keys_lie_dense() const {
  return batch() == 1 && !cache && capacity == 0 && keys.layout != Layout::ranges;
}

Options Problem::layer_options(int ranks) const {
  Options fitted = options;
  fitted.keys = keys.rule();
  if (queries) fitted.queries = queries->rule();
  fitted.limits = {
      .max_tokens = queries ? static_cast<std::int64_t>(run_size(ranks).most_tokens) : tokens(),
      .max_batch = batch(),
      // 0 is an unknown length, which gradients do not take.
      .max_kv_len =
          std::max(*std::max_element(kv_lens.begin(), kv_lens.end()), goes_back() ? 1 : 0),
      .max_total_keys = std::accumulate(kv_lens.begin(), kv_lens.end(), std::int64_t{0}),
      .max_query_len = *std::max_element(q_lens.begin(), q_lens.end()),
      .dense_keys = keys_lie_dense()};
  return fitted;
}

Shard Cut::on(int rank, int ranks, std::int64_t length) const {
  if (layout == Layout::ranges) return Shard::ranges(length, rank, ranks, ranges.data());
  if (layout == Layout::listed)
    return Shard::at_positions(length, rank, ranks, listed[rank].data(),
                               static_cast<std::int64_t>(listed[rank].size()));
  return {layout, rank, ranks, length, block};
}

std::int64_t Problem::tokens() const {
  return std::accumulate(q_lens.begin(), q_lens.end(), std::int64_t{0});
}
std::vector<std::int32_t> Problem::query_start() const { return starts<std::int32_t>(q_lens); }
std::vector<std::int64_t> Problem::key_start() const { return starts<std::int64_t>(kv_lens); }

double Problem::scale() const { return options.score.scale_of(options.head_dim); }

double Problem::visible_pairs() const {
  double pairs = 0;
  for (int b = 0; b < batch() && !indices.empty(); ++b)
    for (std::int64_t t = 0; t < q_lens[b]; ++t)
      for (int head = 0; head < lists; ++head) {
        const std::vector<std::int64_t> times = named(b, t, head * (options.heads / lists));
        pairs += static_cast<double>(std::accumulate(times.begin(), times.end(), std::int64_t{0})) /
                 lists;
      }
  if (!indices.empty()) return pairs;
  for (int b = 0; b < batch(); ++b) {
    for (std::int64_t t = 0; t < q_lens[b]; ++t) {
      const Interval seen = visible(b, position(b, t));
      std::vector<double> hidden;
      hide_unseen(hidden, mask(b), position(b, t), kv_lens[b],
                  left_padding.empty() ? 0 : left_padding[b],
                  of_sequence(bidirectional, b, batch()));
      if (!seen.empty()) pairs += static_cast<double>(seen.end - seen.begin);
      for (std::int64_t j = seen.begin; j < seen.end && !hidden.empty(); ++j)
        if (hidden[j] != 0) --pairs;
    }
  }
  return pairs;
}

std::int64_t Problem::position(int b, std::int64_t t) const {
  return options.mask.alignment == Alignment::upper_left ? t : kv_lens[b] - q_lens[b] + t;
}

Mask Problem::mask(int b) const {
  Mask rule = options.mask;
  if (!causal.empty()) rule.causal = causal[b] != 0;
  if (!prefix.empty()) rule.prefix = prefix[b];
  return rule;
}

Interval Problem::visible(int b, std::int64_t position) const {
  return seen_keys(mask(b), position, kv_lens[b], of_sequence(documents, b, batch()),
                   left_padding.empty() ? 0 : left_padding[b],
                   of_sequence(bidirectional, b, batch()));
}

std::vector<std::int64_t> Problem::named(int b, std::int64_t t, int head) const {
  std::vector<std::int64_t> times(static_cast<std::size_t>(kv_lens[b]));
  const std::int64_t row = query_start()[b] + t, columns = index_columns();
  const std::int64_t first = (row * lists + head / (options.heads / lists)) * columns;
  const std::int64_t count = index_len.empty() ? columns : index_len[row];
  for (std::int64_t i = first; i < first + std::min(columns, count); ++i)
    if (indices[i] >= 0 && indices[i] < kv_lens[b]) ++times[static_cast<std::size_t>(indices[i])];
  return times;
}

std::vector<double> Problem::bias(int b, std::int64_t t, int head) const {
  if (!indices.empty()) {
    const std::vector<std::int64_t> times = named(b, t, head);
    std::vector<double> weights(times.size());
    std::transform(times.begin(), times.end(), weights.begin(),
                   [](std::int64_t n) { return std::log(static_cast<double>(n)); });
    return weights;
  }
  std::vector<double> bias;
  hide_unseen(bias, mask(b), position(b, t), kv_lens[b], left_padding.empty() ? 0 : left_padding[b],
              of_sequence(bidirectional, b, batch()));
  if (slopes.empty() && qq_bias.empty()) return bias;
  bias.resize(kv_lens[b]);
  const std::int64_t context = position(b, 0);
  for (std::int64_t j = 0; j < kv_lens[b]; ++j) {
    const std::int64_t column = j - context;  // counted from the first new token
    if (!slopes.empty()) {
      const std::size_t row = slopes_of_sequences() ? static_cast<std::size_t>(b) : 0;
      bias[j] += slopes[row * static_cast<std::size_t>(options.heads) + head] *
                 alibi_term(options.score.alibi, context + t, j, context);
    }
    if (!qq_bias.empty() && column >= 0 && column < qq_width)
      bias[j] += qq_bias[t * qq_width + column];
  }
  return bias;
}

std::vector<double> Problem::dropout(int b, std::int64_t t, int head) const {
  if (options.dropout.p == 0) return {};
  const DropoutOf row{
      options.dropout.p,
      static_cast<std::uint64_t>(dropout_seed[0]),
      static_cast<std::uint64_t>(dropout_seed[1]),
      static_cast<std::uint32_t>(
          dropout_sequences.empty() ? b : dropout_sequences[static_cast<std::size_t>(b)]),
      static_cast<std::uint32_t>(options.dropout.first_head + head),
      position(b, t)};
  return dropout_factors<float>(row, kv_lens[static_cast<std::size_t>(b)]);
}

Options Trial::layer_options(const std::string& strategy) const {
  Options options = problem_.layer_options(world_.size());
  options.strategy = strategy;
  return options;
}

Trial::Trial(const Communicator& world, const Problem& problem, const std::string& strategy)
    : problem_(problem),
      world_(world),
      rows_(rows_on(problem, world.rank(), world.size())),
      layer_(std::in_place, world, layer_options(strategy)) {
  const Options& o = problem.options;
  const Device device = world.device();
  const auto own_rows = static_cast<std::int64_t>(rows_.size());

  // The lengths and shards in the form that the device reads.
  const bool one = problem.batch() == 1;
  shard_ = problem.keys.on(world.rank(), world.size(), problem.kv_lens[0]);
  if (shard_.layout == Layout::ranges) key_table_ = on_device(device, problem.keys.ranges);
  if (shard_.layout == Layout::listed)
    key_table_ = on_device(device, problem.keys.listed[world.rank()]);
  query_start_ = on_device(device, problem.query_start());
  kv_len_ = on_device(device, problem.kv_lens);
  sinks_ = on_device(device, problem.sinks);

  q_ = filled(device, problem.q.row_bytes() * own_rows, [&](std::byte* to) {
    parallel_for(own_rows, o.threads, [&](std::int64_t i) {
      problem.q.read(rows_[i], 0, problem.q.row_size(), to + i * problem.q.row_bytes());
    });
  });
  out_ = poisoned(device, own_rows * problem.out_row_bytes());
  lse_ = poisoned(device, own_rows * o.heads * sizeof(float));

  if (problem.cache) {
    const std::int64_t page = problem.cache.page;
    for (const std::int64_t length : problem.kv_lens)
      columns_ = std::max(columns_, (shard_.local_len(length) + page - 1) / page);
    columns_ += 1;  // for a column that no row needs
    // Pages have an order unlike any layout's: every third comes first, then the others.
    pages_ = columns_ * problem.batch() + 2;
    std::vector<std::int32_t> order(pages_);
    for (std::int64_t first = 0, i = 0; first < 3; ++first)
      for (std::int64_t p = first; p < pages_; p += 3) order[i++] = static_cast<std::int32_t>(p);
    table_.assign(columns_ * problem.batch(), -1);
    std::size_t next = 0;
    for (int b = 0; b < problem.batch(); ++b)
      for (std::int64_t i = 0; i * page < shard_.local_len(problem.kv_lens[b]); ++i)
        table_[b * columns_ + i] = order[next++];
    block_table_ = on_device(device, table_);
    k_ = pages(problem.keys_in_memory(), false);
    if (!o.values_in_keys) v_ = pages(problem.v, true);
    args_.k = page_view(k_.data(), false);
    if (!o.values_in_keys) args_.v = page_view(v_.data(), true);
    args_.block_table = {
        static_cast<const std::int32_t*>(block_table_.data()), {problem.batch(), columns_}, device};
  } else {
    k_ = keys_in_place(problem.keys_in_memory());
    if (!o.values_in_keys) v_ = keys_in_place(problem.v);
    const auto view = [&](const Buffer& memory, const Source& source) {
      if (problem.capacity > 0)
        return Tensor(memory.data(), source.dtype,
                      {problem.batch(), problem.capacity, o.kv_heads, source.dim}, device);
      const auto rows = static_cast<std::int64_t>(memory.bytes() / source.row_bytes());
      return Tensor(memory.data(), source.dtype, {rows, o.kv_heads, source.dim}, device);
    };
    args_.k = view(k_, problem.keys_in_memory());
    if (!o.values_in_keys) args_.v = view(v_, problem.v);
  }
  args_.q = Tensor(q_.data(), problem.q.dtype, {own_rows, o.heads, o.head_dim}, device);
  args_.out =
      Tensor(out_.data(), problem.out_dtype(), {own_rows, o.heads, problem.value_dim()}, device);
  args_.lse = Lse::tokens_heads(Tensor(lse_.data(), DType::fp32, {own_rows, o.heads}, device));
  if (key_table_.bytes() > 0) args_.key_table = array<std::int64_t>(key_table_, device);
  if (one) args_.total_keys = problem.kv_lens[0];
  if (!one) args_.query_start = array<std::int32_t>(query_start_, device);
  if (!one) args_.kv_len = array<std::int32_t>(kv_len_, device);
  if (!problem.sinks.empty()) args_.sinks = array<float>(sinks_, device);
  if (problem.queries) args_.total_tokens = problem.tokens();
  take_features();
  if (problem.goes_back()) take_gradients();
}

void Trial::take_features() {
  const Problem& p = problem_;
  const Device device = world_.device();
  const auto floats = [&](Buffer& buffer, const std::vector<float>& values) {
    buffer = on_device(device, values);
    return values.empty() ? Tensor() : array<float>(buffer, device);
  };
  args_.slopes = floats(slopes_, p.slopes);
  if (p.slopes_of_sequences())
    args_.slopes = {
        static_cast<const float*>(slopes_.data()), {p.batch(), p.options.heads}, device};
  const auto scales = [&](Buffer& buffer, const std::vector<float>& values) {
    const Tensor flat = floats(buffer, values);
    if (values.size() <= static_cast<std::size_t>(p.options.kv_heads)) return flat;
    return Tensor(flat.data, DType::fp32, {p.batch(), p.options.kv_heads}, device);
  };
  args_.q_scale = scales(q_scale_, p.q_scale);
  args_.k_scale = scales(k_scale_, p.k_scale);
  // Values in the memory of keys have their scale, which a GPU cannot compare with another.
  args_.v_scale = p.options.values_in_keys ? args_.k_scale : scales(v_scale_, p.v_scale);
  if (p.out_scale != 0) args_.out_scale = floats(out_scale_, {p.out_scale});
  if (!p.qq_bias.empty()) {
    qq_bias_ = on_device(device, p.qq_bias);
    args_.qq_bias = {static_cast<const float*>(qq_bias_.data()), {p.qq_width, p.qq_width}, device};
  }
  if (p.options.dropout.p > 0) {
    dropout_seed_ =
        on_device(device, std::vector<std::int64_t>(p.dropout_seed.begin(), p.dropout_seed.end()));
    args_.dropout_seed = array<std::int64_t>(dropout_seed_, device);
    dropout_sequences_ = on_device(device, p.dropout_sequences);
    if (!p.dropout_sequences.empty())
      args_.dropout_sequences = array<std::int32_t>(dropout_sequences_, device);
  }
  causal_ = on_device(device, p.causal);
  documents_ = on_device(device, p.documents);
  bidirectional_ = on_device(device, p.bidirectional);
  if (!p.causal.empty()) args_.causal = array<std::uint8_t>(causal_, device);
  left_padding_ = on_device(device, p.left_padding);
  if (!p.documents.empty())
    args_.documents = {static_cast<const std::int64_t*>(documents_.data()),
                       {p.batch(), std::ssize(p.documents) / p.batch()},
                       device};
  indices_ = on_device(device, p.indices);
  index_len_ = on_device(device, p.index_len);
  const auto* const named = static_cast<const std::int32_t*>(indices_.data());
  if (!p.indices.empty())
    args_.indices = p.lists > 1 ? Tensor(named, {p.tokens(), p.lists, p.index_columns()}, device)
                                : Tensor(named, {p.tokens(), p.index_columns()}, device);
  if (!p.index_len.empty()) args_.index_len = array<std::int32_t>(index_len_, device);
  if (!p.bidirectional.empty())
    args_.bidirectional = {static_cast<const std::int64_t*>(bidirectional_.data()),
                           {p.batch(), std::ssize(p.bidirectional) / p.batch() / 2, 2},
                           device};
  prefix_ = on_device(device, p.prefix);
  if (!p.prefix.empty()) args_.prefix_len = array<std::int32_t>(prefix_, device);
  if (!p.left_padding.empty()) args_.left_padding = array<std::int32_t>(left_padding_, device);
}

void Trial::take_gradients() {
  const Problem& p = problem_;
  const Device device = world_.device();
  const auto own_rows = std::ssize(rows_);
  const auto rows_of = [&](const Source& source) {
    return filled(device, source.row_bytes() * own_rows, [&](std::byte* to) {
      parallel_for(own_rows, p.options.threads, [&](std::int64_t i) {
        source.read(rows_[i], 0, source.row_size(), to + i * source.row_bytes());
      });
    });
  };
  const auto like = [&](const Tensor& tensor, Buffer& buffer) {
    const auto bytes = tensor.size() * static_cast<std::int64_t>(size_of(p.gradient_dtype()));
    buffer = poisoned(device, bytes);
    Tensor gradient = tensor;
    gradient.data = buffer.data();
    gradient.dtype = p.gradient_dtype();
    return gradient;
  };
  dout_ = rows_of(p.dout);
  back_.run = args_;
  back_.dout = Tensor(dout_.data(), p.dout.dtype, {own_rows, p.options.heads, p.dout.dim}, device);
  if (p.dlse) {
    dlse_ = rows_of(*p.dlse);
    back_.dlse =
        Lse::tokens_heads(Tensor(dlse_.data(), DType::fp32, {own_rows, p.options.heads}, device));
  }
  back_.dq = like(args_.q, dq_);
  back_.dk = like(args_.k, dk_);
  back_.dv = like(args_.v, dv_);
  if (p.sinks.empty()) return;
  dsinks_ = poisoned(device, p.sinks.size() * sizeof(float));
  back_.dsinks = {static_cast<const float*>(dsinks_.data()), {p.options.heads}, device};
}

Tensor Trial::page_view(void* data, bool values) const {
  const Options& o = problem_.options;
  const Source& keys = problem_.keys_in_memory();
  const DType dtype = keys.dtype;
  const Device device = world_.device();
  const std::int64_t page = problem_.cache.page, x = chunk_of(dtype, o.head_dim);
  const int dim = values ? problem_.v.dim : keys.dim;
  if (!problem_.cache.x_packed) return Tensor(data, dtype, {pages_, page, o.kv_heads, dim}, device);
  if (values) return Tensor(data, dtype, {pages_, o.kv_heads, dim, page}, device);
  return Tensor(data, dtype, {pages_, o.kv_heads, o.head_dim / x, page, x}, device);
}

Buffer Trial::pages(const Source& source, bool values) const {
  const Options& o = problem_.options;
  const StorageFormat format = storage_of(source.dtype);
  const std::int64_t page = problem_.cache.page, x = chunk_of(source.dtype, source.dim);
  const int dim = source.dim;
  const RowFormat rows = row_format_of(o.dtypes.of_kv());
  const auto place = [&](std::int64_t row, std::int64_t head, std::int64_t d) {
    if (rows.apart > 0)  // the data of all rows, and then their scales
      return d < rows.data_bytes()
                 ? row * rows.data_bytes() + d
                 : page * rows.data_bytes() + row * rows.apart + d - rows.scales_at;
    if (!problem_.cache.x_packed) return (row * o.kv_heads + head) * dim + d;
    if (values) return (head * dim + d) * page + row;
    return ((head * (dim / x) + d / x) * page + row) * x + d % x;
  };
  const std::size_t page_bytes = page * source.row_bytes();
  const auto start = problem_.key_start();
  return filled(world_.device(), pages_ * page_bytes, [&](std::byte* to) {
    std::memset(to, 0xff, pages_ * page_bytes);
    for (int b = 0; b < problem_.batch(); ++b) {
      const std::int64_t length = problem_.kv_lens[b];
      parallel_for(shard_.local_len(length), o.threads, [&](std::int64_t i) {
        std::vector<std::byte> row(source.row_bytes());
        source.read(start[b] + shard_.position(i, length), 0, source.row_size(), row.data());
        std::byte* const own = to + table_[b * columns_ + i / page] * page_bytes;
        for (std::int64_t h = 0; h < o.kv_heads; ++h)
          for (std::int64_t d = 0; d < dim; ++d)
            std::memcpy(own + format.bytes(place(i % page, h, d)),
                        row.data() + format.bytes(h * dim + d),
                        static_cast<std::size_t>(format.bytes(1)));
      });
    }
  });
}

Buffer Trial::keys_in_place(const Source& source) const {
  const std::size_t row_bytes = source.row_bytes();
  const std::vector<OwnKey> keys = keys_on(problem_, shard_);
  const std::int64_t slots =
      problem_.capacity > 0 ? problem_.capacity * problem_.batch() : std::ssize(keys);
  return filled(world_.device(), slots * row_bytes, [&](std::byte* to) {
    if (problem_.capacity > 0) std::memset(to, 0xff, slots * row_bytes);
    parallel_for(std::ssize(keys), problem_.options.threads, [&](std::int64_t i) {
      source.read(keys[i].number, 0, source.row_size(), to + keys[i].slot * row_bytes);
    });
  });
}

void Trial::run() {
  forward();
  if (problem_.goes_back()) backward();
}

void Trial::forward() {
  queue({});
  layer_->wait();
}

void Trial::backward() {
  layer_->backward(back_);
  layer_->wait();
}

void Trial::poison() {
  for (Buffer* output : {&out_, &lse_, &dq_, &dk_, &dv_, &dsinks_})
    launcher::poison(world_.device(), *output);
}

void Trial::take_strategy(const std::string& name) {
  layer_.reset();  // before the memory of another
  poison();
  layer_.emplace(world_, layer_options(name));
}

Answer Trial::answer() const {
  const auto bytes_of = [](const Buffer& buffer) {
    std::vector<std::byte> bytes(buffer.bytes());
    if (!bytes.empty()) buffer.download(bytes.data());
    return bytes;
  };
  const auto floats_of = [](const Buffer& buffer) {
    std::vector<float> floats(buffer.bytes() / sizeof(float));
    if (!floats.empty()) buffer.download(floats.data());
    return floats;
  };
  Answer answer{.rows = rows_, .out = bytes_of(out_), .lse = floats_of(lse_)};
  unite_nans(answer.out, layer_->options().dtypes.of_out());
  if (!problem_.goes_back()) return answer;
  answer.dq = bytes_of(dq_);
  answer.dsinks = floats_of(dsinks_);
  const std::vector<OwnKey> keys = keys_on(problem_, shard_);
  for (const OwnKey& key : keys) answer.keys.push_back(key.number);
  const auto rows_of = [&](const Buffer& buffer, std::size_t row_bytes) {
    const std::vector<std::byte> all = bytes_of(buffer);
    std::vector<std::byte> own(keys.size() * row_bytes);
    for (std::size_t i = 0; i < keys.size(); ++i)
      std::memcpy(&own[i * row_bytes], &all[keys[i].slot * row_bytes], row_bytes);
    return own;
  };
  const RowBytes bytes(problem_);
  answer.dk = rows_of(dk_, bytes.dk);
  answer.dv = rows_of(dv_, bytes.dv);
  return answer;
}

namespace {

/// An array of rows that this rank has, and one of the wanted rows, to be filled.
struct Gathered {
  const std::byte* from;
  std::byte* to;
  std::size_t row_bytes;
};

/// Fills the arrays with the `wanted` rows, which ascend, from the ranks that have them.
/// Collective, but where every rank has all rows.
void gather(const Communicator& world, const std::vector<std::int64_t>& held,
            const std::vector<std::int64_t>& wanted, bool all_have_them,
            std::span<const Gathered> arrays, const char* step) {
  std::size_t record = sizeof(std::ptrdiff_t);
  for (const Gathered& array : arrays) record += array.row_bytes;
  std::string mine;  // records of a row's place, and of the row in each array
  for (std::size_t i = 0; i < held.size(); ++i) {
    const auto found = std::lower_bound(wanted.begin(), wanted.end(), held[i]);
    if (found == wanted.end() || *found != held[i]) continue;
    const std::ptrdiff_t at = found - wanted.begin();
    if (!all_have_them) mine.append(reinterpret_cast<const char*>(&at), sizeof at);
    for (const Gathered& array : arrays) {
      const std::byte* const row = array.from + i * array.row_bytes;
      if (all_have_them)
        std::memcpy(array.to + at * array.row_bytes, row, array.row_bytes);
      else
        mine.append(reinterpret_cast<const char*>(row), array.row_bytes);
    }
  }
  if (all_have_them) return;
  for (const std::string& records : world.gather(mine, step)) {
    for (std::size_t i = 0; i < records.size(); i += record) {
      const char* row = records.data() + i;
      std::ptrdiff_t at;
      std::memcpy(&at, row, sizeof at);
      row += sizeof at;
      for (const Gathered& array : arrays) {
        std::memcpy(array.to + at * array.row_bytes, row, array.row_bytes);
        row += array.row_bytes;
      }
    }
  }
}

std::byte* bytes_of(std::vector<float>& floats) {
  return reinterpret_cast<std::byte*>(floats.data());
}
const std::byte* bytes_of(const std::vector<float>& floats) {
  return reinterpret_cast<const std::byte*>(floats.data());
}

}  // namespace

Answer gather_rows(const Communicator& world, const Problem& problem, const Answer& answer,
                   const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& keys) {
  const RowBytes bytes(problem);
  Answer whole{.rows = rows,
               .out = std::vector<std::byte>(rows.size() * bytes.out),
               .lse = std::vector<float>(rows.size() * problem.q.heads)};
  std::vector<Gathered> arrays{{answer.out.data(), whole.out.data(), bytes.out},
                               {bytes_of(answer.lse), bytes_of(whole.lse), bytes.lse}};
  if (problem.goes_back()) {
    whole.dq.resize(rows.size() * bytes.dq);
    arrays.push_back({answer.dq.data(), whole.dq.data(), bytes.dq});
  }
  gather(world, answer.rows, rows, !problem.queries, arrays, "gather of result rows");
  if (!problem.goes_back()) return whole;

  whole.dsinks = answer.dsinks;
  whole.keys = keys;
  whole.dk.resize(keys.size() * bytes.dk);
  whole.dv.resize(keys.size() * bytes.dv);
  const Gathered of_keys[] = {{answer.dk.data(), whole.dk.data(), bytes.dk},
                              {answer.dv.data(), whole.dv.data(), bytes.dv}};
  gather(world, answer.keys, keys, false, of_keys, "gather of gradients");
  return whole;
}

std::uint64_t digest(const Communicator& world, const Problem& problem, const Answer& answer) {
  // The digest is a sum over rows and keys, each hashed with its place in the whole, so it needs no
  // order of ranks.
  const auto hash_of = [&](std::uint64_t hash, const std::byte* row, std::size_t row_bytes) {
    for (std::size_t at = 0; at < row_bytes; at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, row + at, std::min(sizeof word, row_bytes - at));
      hash = mix(hash ^ word) + at;
    }
    return hash;
  };
  struct Rows {
    const std::byte* data;
    std::size_t row_bytes;
  };
  const auto sum_of = [&](const std::vector<std::int64_t>& numbers, std::uint64_t salt,
                          std::initializer_list<Rows> arrays) {
    std::vector<std::uint64_t> hashes(numbers.size());
    parallel_for(std::ssize(numbers), problem.options.threads, [&](std::int64_t i) {
      hashes[i] = mix(numbers[i] + 1 + salt);
      for (const Rows& rows : arrays)
        hashes[i] = hash_of(hashes[i], rows.data + i * rows.row_bytes, rows.row_bytes);
    });
    return std::accumulate(hashes.begin(), hashes.end(), std::uint64_t{0});
  };
  constexpr std::uint64_t kOfKeys = std::uint64_t{1} << 62;  // apart from the rows'
  const RowBytes bytes(problem);
  std::uint64_t own = 0;     // of this rank alone
  std::uint64_t common = 0;  // the same on all ranks
  (problem.queries ? own : common) =
      problem.goes_back()
          ? sum_of(answer.rows, 0, {{answer.out.data(), bytes.out}, {answer.dq.data(), bytes.dq}})
          : sum_of(answer.rows, 0, {{answer.out.data(), bytes.out}});
  if (problem.goes_back()) {
    own +=
        sum_of(answer.keys, kOfKeys, {{answer.dk.data(), bytes.dk}, {answer.dv.data(), bytes.dv}});
    common += hash_of(0, bytes_of(answer.dsinks), answer.dsinks.size() * sizeof(float));
  }

  std::uint64_t sum = common;
  const std::vector<std::string> all =
      world.gather(fmt::format("{} {}", own, common), "digest of the result");
  const auto common_of = [](const std::string& text) { return text.substr(text.find(' ')); };
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    sum += std::stoull(all[rank]);
    if (common_of(all[rank]) != common_of(all[0]))
      throw SharedError(
          ErrorKind::wrong_result,
          fmt::format("the results of ranks 0 and {} differ in their bits; what every "
                      "rank gets must be equal: a defect of longspan",
                      rank));
  }
  return sum;
}

}  // namespace longspan::launcher
