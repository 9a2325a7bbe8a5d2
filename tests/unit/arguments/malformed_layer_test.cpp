// Random malformed arguments to a layer: its options, runs and appends, and attend(); and to the
// forecast of one.
#include <numeric>

#include "longspan/machine.hpp"
#include "longspan/strategy.hpp"
#include "tests/support/malformed.hpp"

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

/// Reduces a batch to its second sequence, whose queries are all rows.
void take_one_sequence(AttentionArgs& r, Memory& m, Chaos& c) {
  r.query_start = {};
  r.kv_len = Tensor(m.kv_len.data() + 1, {1});
  if (c.once_in(2)) r.kv_len = {}, r.total_keys = 33;
}

/// Tables and totals for the layout of the keys, and of the queries where they are shared.
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
        o.rope = {.dim = kDim, .interleaved = true};
        o.keys.layout = keys;
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
             r.documents = Tensor(m.numbers.data(), {kBatch, 1});
             if (c.once_in(2)) c.tensor(r.documents);
           },
           [&] {
             r.bidirectional = Tensor(m.numbers.data(), {c.of<std::int64_t>({0, 1, 2}), 2});
             if (c.once_in(2)) c.tensor(r.bidirectional);
           },
           [&] {
             r.prefix_len = r.kv_len;
             if (c.once_in(2)) c.tensor(r.prefix_len);
           },
           [&] {
             r.left_padding = r.query_len = r.kv_len;
             if (c.once_in(2)) c.tensor(c.once_in(2) ? r.left_padding : r.query_len);
           },
           [&] {
             r.qq_bias = m.bias();
             if (c.once_in(2)) c.tensor(r.qq_bias);
           },
           [&] { r.rope_cos = r.rope_sin = m.rotation(); },
           [&] {
             r.rope_cos = r.rope_sin = m.rotation();
             c.tensor(c.once_in(2) ? r.rope_cos : r.rope_sin);
           },
           [&] {
             r.rope_cos = m.rotation();
             r.rope_cos.shape[0] = c.of<std::int64_t>({-1, 0, 1, 32, 33, kMost});
             r.rope_sin = r.rope_cos;
           },
           [&] { r.skip_decode = true; }});
    attempt(m, [&] { layer.run(r); });
    attempt(m, [&] {
      layer.append({r.new_k, r.new_v, r.k, r.v, r.total_keys, r.query_start, r.kv_len,
                    r.block_table, r.key_table, r.k_scale, r.v_scale, r.rope_cos, r.rope_sin});
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

class MalformedOptions : public Malformed {
 protected:
  /// Changes to the options of a layer or a forecast.
  std::vector<Change> changes_of_options(Options& o) {
    Chaos& c = chaos_;
    return {[&c, &o] {
              o.heads = c.of({-4, 0, 1, 3, kMostInt});
            },
            [&c, &o] {
              o.kv_heads = c.of({-2, 0, 1, 3, kMostInt});
            },
            [&c, &o] {
              o.head_dim = c.of({-32, 0, 1, 8, 21, 64, 576, 577, kMostInt});
            },
            [&c, &o] {
              o.value_dim = c.of({-32, 0, 1, 8, 21, 64, 512, 513});
            },
            [&c, &o] { o.dtypes.compute = c.dtype(); },
            [&c, &o] { o.dtypes.query = c.dtype(); },
            [&c, &o] { o.dtypes.kv = c.dtype(); },
            [&c, &o] { o.dtypes.out = c.dtype(); },
            [&c, &o] { o.dtypes.tf32 = true; },
            [&c, &o] { o.dtypes.fp8_products = true; },
            [&c, &o] { o.dtypes.bf16_products = true; },
            [&c, &o] { c.mask(o.mask); },
            [&c, &o] { o.score.scale = c.number(); },
            [&c, &o] { o.score.softcap = c.number(); },
            [&c, &o] {
              o.score.alibi = static_cast<Alibi>(c.of({0, 1, 2, 3, 255}));
            },
            [&c, &o] {
              o.rope.dim = c.of({kLeastInt, -2, 1, 2, 6, kDim, kDim + 2, kMostInt});
            },
            [&c, &o] { o.rope = {.dim = 8, .base = c.number(), .scale = c.number()}; },
            [&c, &o] { o.rope.interleaved = true; },
            [&c, &o] { o.limits.max_tokens = c.count(); },
            [&c, &o] {
              o.limits.max_batch = c.of({kLeastInt, -1, 0, 1, 1000});
            },
            [&c, &o] { o.limits.max_kv_len = c.count(); },
            [&c, &o] { o.limits.max_total_keys = c.count(); },
            [&c, &o] { o.limits.max_query_len = c.count(); },
            [&c, &o] { c.sharding(o.keys); },
            [&c, &o] { o.queries = Sharding{}; },
            [&c, &o] { c.sharding(o.queries.emplace()); },
            [&c, &o] { c.sharding(o.results.rows); },
            [&c, &o] {
              o.results.part = static_cast<ResultPart>(c.of({0, 1, 2, 3, 255}));
            },
            [&c, &o] { o.invariant = true; },
            [&c, &o] {
              o.ranks_per_node = c.of({-1, 0, 1, 2, 3, kMostInt});
            },
            [&c, &o] { o.strategy = "pigeon"; },
            [&c, &o] {
              o.exchange = c.once_in(2) ? static_cast<Exchange>(77) : Exchange::peer_buffers;
            },
            [&c, &o] {
              o.threads = c.of({kLeastInt, -1, 0, 1, 3, kMostInt});
            },
            [&c, &o] { o.debug.check_arrays = o.debug.profile = true; }};
  }
};

TEST_F(MalformedOptions, OfALayer) {
  for (int round = 0; round < kRounds; ++round) {
    Memory m(chaos_.random);
    Options o = layer_options();
    o.threads = 1;
    apply(changes_of_options(o));
    attempt(m, [&] {
      Attention layer(self(), o);
      layer.run(layer_args(m, chaos_));
      layer.wait();
    });
  }
}

TEST_F(MalformedOptions, OfAForecast) {
  constexpr double Machine::*kConstants[] = {
      &Machine::flops_per_s,           &Machine::key_bytes_per_s,  &Machine::merge_bytes_per_s,
      &Machine::copy_bytes_per_s,      &Machine::call_s,           &Machine::latency_s,
      &Machine::peer_latency_s,        &Machine::link_bytes_per_s, &Machine::node_latency_s,
      &Machine::node_link_bytes_per_s, &Machine::overlap};
  Memory m(chaos_.random);
  Chaos& c = chaos_;
  const auto number = [&c] {
    return c.of({0.0, 1.0, -1.0, 33.0, 1e-300, 1e18, 1e300, double{NAN}, double{INFINITY}});
  };
  for (int round = 0; round < kRounds / 4; ++round) {
    Options o = layer_options();
    o.limits.max_kv_len = kKeys;
    o.keys.layout = static_cast<Layout>(c.random() % 6);
    if (c.once_in(2)) o.queries = o.keys;
    Topology topology{.ranks = c.of({1, 2, 4}), .ranks_per_node = c.of({0, 1, 2})};
    RunSize size{.tokens = 4, .most_tokens = 4, .keys = 60, .sequences = 2};
    Machine machine = built_in_machine(c.once_in(2) ? Device::host : Device::cuda);
    std::vector<Change> changes = changes_of_options(o);
    for (const Change& change : std::initializer_list<Change>{
             [&] {
               topology.ranks = c.of({kLeastInt, -1, 0, 3, 1 << 20, 1 << 21});
             },
             [&] {
               topology.ranks_per_node = c.of({kLeastInt, -1, 5, kMostInt});
             },
             [&] { size.tokens = number(); }, [&] { size.most_tokens = number(); },
             [&] { size.keys = number(); }, [&] { size.sequences = number(); },
             [&] {
               size.each.push_back({c.count(), c.count()});
             },
             [&] {
               size.each.push_back({3, 40});
             },
             [&] { machine.*kConstants[c.random() % std::size(kConstants)] = number(); }})
      changes.push_back(change);
    if (!c.once_in(8)) apply(changes);
    attempt(m, [&] {
      for (const Forecast& f : forecast(o, topology, size, machine))
        EXPECT_TRUE(!f.refusal.empty() || f.seconds() >= 0) << "seed " << seed_;
    });
    attempt(m, [&] { choose_strategy(o, topology.ranks, machine); });
    attempt(m, [&] { cost_of(o, topology.ranks, size, machine.device); });
    attempt(m, [&] {
      const RunSize largest = largest_run(o, topology.ranks);
      EXPECT_TRUE(largest.tokens >= 0 && largest.keys >= 0) << "seed " << seed_;
    });
  }
}

}  // namespace
}  // namespace longspan
