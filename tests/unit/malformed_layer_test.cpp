// Random malformed arguments to a layer: its options, runs and appends, and attend().
#include <numeric>

#include "tests/support/malformed.hpp"

#if defined(__SANITIZE_ADDRESS__)
/// Memory that there is not is refused by an Error, which the sanitizer is not to end first.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace longspan {
namespace {

Options layer_options() {
  return {.heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .dtypes = {.compute = fp32},
          .mask = {.causal = true},
          .limits = {.max_tokens = kTokens, .max_batch = kBatch},
          .threads = 2};
}

AttentionArgs layer_args(Memory& m, Chaos& c) {
  AttentionArgs r{.q = m.tokens(m.q, kHeads),
                  .k = m.pages(m.k),
                  .v = m.pages(m.v),
                  .out = m.tokens(m.out, kHeads),
                  .lse = m.out_lse(),
                  .query_start = m.starts(),
                  .kv_len = m.lengths(),
                  .block_table = m.block_table()};
  if (c.once_in(3)) {  // contiguous, each sequence from the start of its row, or packed
    r.block_table = {};
    r.k.dims = r.v.dims = 4;
    r.k.shape = r.v.shape = {2, kKeys, kKvHeads, kDim};
    r.k.stride[0] = r.v.stride[0] = kKeys * kKvHeads * kDim;
    if (c.once_in(2)) {
      r.k = Tensor(m.k.data(), fp32, {kKeys, kKvHeads, kDim});
      r.v = Tensor(m.v.data(), fp32, {kKeys, kKvHeads, kDim});
    }
  }
  if (c.once_in(3)) {
    r.new_k = m.tokens(m.new_k, kKvHeads);
    r.new_v = m.tokens(m.new_v, kKvHeads);
  }
  return r;
}

/// Makes of a batch its second sequence, whose queries are all rows.
void take_one_sequence(AttentionArgs& r, Memory& m, Chaos& c) {
  r.query_start = {};
  r.kv_len = Tensor(m.kv_len.data() + 1, {1});
  if (c.once_in(2)) r.kv_len = {}, r.total_keys = 33;
}

/// Tables and totals that go with the layout of the keys, and of the queries where they are shared.
void give_tables(AttentionArgs& r, Memory& m, Chaos& c, const Options& o) {
  const bool table_of_queries =
      (o.queries && o.queries->layout != Layout::contiguous) ||
      (o.results.part == ResultPart::rows && o.results.rows.layout != Layout::contiguous);
  if (o.keys.layout == Layout::listed || table_of_queries || c.once_in(4))
    take_one_sequence(r, m, c);
  const bool one = !r.query_start;
  if (o.keys.layout == Layout::ranges)
    r.key_table = one ? Tensor(m.numbers.data() + 2, {2}) : Tensor(m.numbers.data(), {2, 2});
  if (o.keys.layout == Layout::listed) r.key_table = Tensor(m.numbers.data(), {2});
  if (!o.queries && o.results.part != ResultPart::rows) return;
  if (o.queries) r.total_tokens = kTokens;
  const Layout layout = o.queries ? o.queries->layout : o.results.rows.layout;
  if (layout == Layout::ranges) r.query_table = Tensor(m.rows.data(), {2});
  if (layout == Layout::listed) {
    r.query_table = Tensor(m.rows.data(), {kTokens});
    std::iota(m.rows.begin(), m.rows.begin() + kTokens, 0);
  }
}

TEST_F(Malformed, RunsAndAppendsOfALayer) {
  std::vector<Attention> layers;
  for (const Layout keys :
       {Layout::contiguous, Layout::ranges, Layout::interleaved, Layout::listed})
    for (const bool sharded : {false, true}) {
      Options o = layer_options();
      o.keys.layout = keys;
      for (const Layout queries : {Layout::contiguous, Layout::ranges, Layout::listed}) {
        if (sharded) o.queries = Sharding{queries};
        if (sharded || queries == Layout::contiguous) layers.emplace_back(self(), o);
        if (sharded) continue;
        o.results = {ResultPart::rows, {queries}};
        o.strategy = queries == Layout::ranges ? "gather-states" : "scatter-states";
        layers.emplace_back(self(), o);
        o.results.part = ResultPart::heads;
        layers.emplace_back(self(), o);
        o = layer_options();
        o.keys.layout = keys;
      }
    }
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    Attention& layer = layers[c.random() % layers.size()];
    AttentionArgs r = layer_args(m, c);
    give_tables(r, m, c, layer.options());
    apply({[&] { c.tensor(r.q); },
           [&] { c.tensor(r.k); },
           [&] { c.tensor(r.v); },
           [&] { c.tensor(r.out); },
           [&] { c.tensor(r.lse.tensor); },
           [&] { c.tensor(r.new_k); },
           [&] { c.tensor(r.new_v); },
           [&] {
             r.out.data = c.of({r.q.data, r.k.data, r.v.data, r.lse.tensor.data});
           },
           [&] {
             r.k.stride[0] = r.v.stride[0] = c.of<std::int64_t>({0, -64, 1, 64, kMost});
           },
           [&] { r.v.data = r.k.data; },
           [&] {
             r.total_keys = c.of<std::int64_t>({kLeast, -1, 0, 1, 33, 1 << 20, kMost});
           },
           [&] {
             r.total_tokens = c.of<std::int64_t>({kLeast, -1, 0, 1, 3, 4, 5, kMost});
           },
           [&] { c.tensor(r.key_table); },
           [&] {
             r.key_table = Tensor(m.numbers.data(), {c.of<std::int64_t>({0, 1, 2, 4})});
           },
           [&] { c.tensor(r.query_table); },
           [&] {
             r.query_table = Tensor(m.rows.data(), {c.of<std::int64_t>({0, 1, 2, 4})});
           },
           [&] { c.entry(m.numbers); },
           [&] { c.entry(m.rows); },
           [&] { take_one_sequence(r, m, c); },
           [&] { r.query_start = {}; },
           [&] { r.kv_len = {}; },
           [&] { c.tensor(r.query_start); },
           [&] { c.tensor(r.kv_len); },
           [&] { c.entry(m.query_start); },
           [&] { c.entry(m.kv_len); },
           [&] { c.entry(m.table); },
           [&] { c.tensor(r.block_table); },
           [&] {
             r.block_table.shape[1] = c.of<std::int64_t>({0, 1, 3});
           },
           [&] { c.scales(r.q_scale, m.one); },
           [&] { c.scales(r.k_scale, m.one); },
           [&] { c.scales(r.v_scale, m.one); },
           [&] { r.out_scale = Tensor(m.one.data(), {1}), m.one[0] = c.number(); },
           [&] {
             r.out_scale = Tensor(m.one.data(), {1});
             c.tensor(r.out_scale);
           },
           [&] { r.sinks = Tensor(m.sinks.data(), {kHeads}), m.sinks[1] = c.number(); },
           [&] {
             r.sinks = r.slopes = Tensor(m.sinks.data(), {kHeads});
             c.tensor(c.once_in(2) ? r.sinks : r.slopes);
           },
           [&] {
             r.causal = Tensor(m.causal.data(), {kBatch});
             if (c.once_in(2)) c.tensor(r.causal);
           },
           [&] {
             r.documents = Tensor(m.numbers.data(), {c.of<std::int64_t>({0, 1, 2, 4})});
             if (c.once_in(2)) c.tensor(r.documents);
           },
           [&] {
             r.qq_bias = m.bias();
             if (c.once_in(2)) c.tensor(r.qq_bias);
           },
           [&] { r.skip_decode = true; }});
    attempt(m, [&] { layer.run(r); });
    attempt(m, [&] {
      layer.append({r.new_k, r.new_v, r.k, r.v, r.total_keys, r.query_start, r.kv_len,
                    r.block_table, r.key_table, r.k_scale, r.v_scale});
    });
    if (round % 8 == 0) {
      Options options{.mask = {.causal = true}, .threads = 1};
      options.keys = layer.options().keys;
      options.queries = layer.options().queries;
      options.results = layer.options().results;
      attempt(m, [&] { attend(self(), r, options); });
    }
  }
}

TEST_F(Malformed, OptionsOfALayer) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Chaos& c = chaos_;
    Options o = layer_options();
    o.threads = 1;
    apply({[&] {
             o.heads = c.of({-4, 0, 1, 3, std::numeric_limits<int>::max()});
           },
           [&] {
             o.kv_heads = c.of({-2, 0, 1, 3, std::numeric_limits<int>::max()});
           },
           [&] {
             o.head_dim = c.of({-32, 0, 8, 20, 64, 576, 584, std::numeric_limits<int>::max()});
           },
           [&] {
             o.value_dim = c.of({-32, 0, 8, 20, 64, 512, 520});
           },
           [&] { o.dtypes.compute = c.dtype(); },
           [&] { o.dtypes.query = c.dtype(); },
           [&] { o.dtypes.kv = c.dtype(); },
           [&] { o.dtypes.out = c.dtype(); },
           [&] { o.dtypes.tf32 = true; },
           [&] { o.dtypes.fp8_products = true; },
           [&] { o.dtypes.bf16_products = true; },
           [&] { c.mask(o.mask); },
           [&] { o.score.scale = c.number(); },
           [&] { o.score.softcap = c.number(); },
           [&] {
             o.score.alibi = static_cast<Alibi>(c.of({0, 1, 2, 255}));
           },
           [&] { o.limits.max_tokens = c.count(); },
           [&] {
             o.limits.max_batch = c.of({std::numeric_limits<int>::min(), -1, 0, 1, 1000});
           },
           [&] { o.limits.max_kv_len = c.count(); },
           [&] { o.limits.max_total_keys = c.count(); },
           [&] { o.limits.max_query_len = c.count(); },
           [&] { c.sharding(o.keys); },
           [&] { o.queries = Sharding{}; },
           [&] { c.sharding(o.queries.emplace()); },
           [&] { c.sharding(o.results.rows); },
           [&] {
             o.results.part = static_cast<ResultPart>(c.of({0, 1, 2, 3, 255}));
           },
           [&] { o.invariant = true; },
           [&] { o.strategy = "pigeon"; },
           [&] { o.exchange = c.once_in(2) ? static_cast<Exchange>(77) : Exchange::peer_buffers; },
           [&] {
             o.threads = c.of({std::numeric_limits<int>::min(), -1, 0, 1, 3});
           },
           [&] { o.debug.check_arrays = o.debug.profile = true; }});
    attempt(m, [&] {
      Attention layer(self(), o);
      layer.run(layer_args(m, c));
      layer.wait();
    });
  }
}

}  // namespace
}  // namespace longspan
