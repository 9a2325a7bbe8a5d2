/// \file
/// The table of options and the table of a run's arguments: the name of each in C++, in Python and
/// on the command line, and whether ranks must give the same value. The comparison between ranks
/// and docs/reference/options.md are made from it. The meaning of a member stands beside the member
/// (options.hpp, attention.hpp).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/options.hpp"

namespace longspan {

// ---- options with named choices ---------------------------------------------------------------

/// Every Alibi.
constexpr std::array<Alibi, 3> choices(Alibi) {
  return {Alibi::context, Alibi::query, Alibi::sqrt};
}
/// Every Alignment.
constexpr std::array<Alignment, 2> choices(Alignment) {
  return {Alignment::lower_right, Alignment::upper_left};
}
/// Every Dout.
constexpr std::array<Dout, 2> choices(Dout) { return {Dout::replicated, Dout::partial}; }
/// Every Exchange.
constexpr std::array<Exchange, 4> choices(Exchange) {
  return {Exchange::automatic, Exchange::peer_buffers, Exchange::peer_buffers_apart,
          Exchange::gather};
}

/// The choice of that name; nothing if there is none.
template <class Choice>
std::optional<Choice> choice_named(std::string_view text) {
  for (const Choice choice : choices(Choice{}))
    if (text == name(choice)) return choice;
  return std::nullopt;
}

/// The names of all choices.
template <class Choice>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  for (const Choice choice : choices(Choice{})) names.emplace_back(name(choice));
  return names;
}

// ---- options ----------------------------------------------------------------------------------

/// One option of a layer.
struct OptionInfo {
  const char* group;    ///< the member of Options that holds it, "mask.", or "" for none
  const char* name;     ///< in messages; `group` + `name` is the member
  const char* python;   ///< in longspan.Attention; null: Python has none
  const char* command;  ///< in `longspan run`; null: the command has none
  const char* own;      ///< why ranks may give different values; null: it is compared
  const char* help;     ///< in the help of `longspan run`; null: the command has its own text

  /// "mask.causal".
  std::string member() const { return std::string(group) + name; }
};

/// Calls visit(OptionInfo, member) for every option of the score. `AnyScore` is ScoreOptions, const
/// or not. Python takes all of them, and the command every number. A plain number is above 0, and 0
/// where it is off.
template <class AnyScore, class Visit>
constexpr void visit_score_options(AnyScore& s, const Visit& visit) {
  const auto is = [&](const char* name, const char* python, const char* command, auto& member,
                      const char* help) {
    visit(OptionInfo{"score.", name, python, command, nullptr, help}, member);
  };
  is("scale", "softmax_scale", "--scale", s.scale, "Factor of the scores q.k [1 / sqrt(dim)]");
  is("softcap", "softcap", "--softcap", s.softcap,
     "score = softcap tanh(score / softcap), for a softcap above 0 [none]");
  is("alibi", "alibi", "--alibi", s.alibi, nullptr);
}

/// Calls visit(OptionInfo, member) for every option. `AnyOptions` is Options, const or not.
template <class AnyOptions, class Visit>
constexpr void visit_options(AnyOptions& o, const Visit& visit) {
  const auto is = [&](const char* group, const char* name, const char* python, const char* command,
                      auto& member, const char* own = nullptr) {
    visit(OptionInfo{group, name, python, command, own, nullptr}, member);
  };
  is("", "heads", "heads", "--heads", o.heads);
  is("", "kv_heads", "kv_heads", "--kv-heads", o.kv_heads);
  is("", "head_dim", "head_dim", "--dim", o.head_dim);
  is("", "value_dim", "value_dim", "--value-dim", o.value_dim);
  is("", "values_in_keys", "values_in_keys", "--values-in-keys", o.values_in_keys);

  is("", "dtypes.compute", "dtype", "--dtype", o.dtypes.compute);
  is("", "dtypes.query", "q_dtype", "--qkv-dtype", o.dtypes.query);
  is("", "dtypes.kv", "kv_dtype", "--qkv-dtype", o.dtypes.kv);
  is("", "dtypes.out", "out_dtype", nullptr, o.dtypes.out);
  is("dtypes.", "tf32", "tf32", nullptr, o.dtypes.tf32);
  is("dtypes.", "fp8_products", "fp8_products", "--fp8-products", o.dtypes.fp8_products);
  is("dtypes.", "bf16_products", "bf16_products", "--bf16-products", o.dtypes.bf16_products);

  is("mask.", "causal", "causal", "--causal", o.mask.causal);
  is("mask.", "window", "window_size", "--window", o.mask.window);
  is("mask.", "right", "window_size", "--right", o.mask.right);
  is("mask.", "chunk", "attention_chunk", "--chunk", o.mask.chunk);
  is("mask.", "lookback", "chunk_lookback", "--lookback", o.mask.lookback);
  is("mask.", "prefix", "prefix", "--prefix", o.mask.prefix);
  is("mask.", "clamp_ranges", "clamp_bidirectional", nullptr, o.mask.clamp_ranges);
  is("mask.", "alignment", "causal_alignment", "--causal-alignment", o.mask.alignment);

  visit_score_options(o.score, visit);

  is("", "rope.dim", "rotary_dim", "--rope", o.rope.dim);
  is("", "rope.interleaved", "rotary_interleaved", "--rope-interleaved", o.rope.interleaved);
  is("", "rope.base", "rope_theta", "--rope-theta", o.rope.base);
  is("", "rope.scale", "rope_scale", "--rope-scale", o.rope.scale);

  is("", "dropout.p", "dropout_p", "--dropout", o.dropout.p);
  is("", "dropout.first_head", "dropout_first_head", "--dropout-first-head", o.dropout.first_head);

  is("", "indices.top_k", "top_k", "--top-k", o.indices.top_k);
  is("", "indices.slots", "index_slots", nullptr, o.indices.slots);

  is("limits.", "max_tokens", "max_queries", nullptr, o.limits.max_tokens);
  is("limits.", "max_batch", "max_batch", nullptr, o.limits.max_batch);
  is("limits.", "max_kv_len", "max_seqlen_k", nullptr, o.limits.max_kv_len);
  is("limits.", "max_total_keys", "max_total_keys", nullptr, o.limits.max_total_keys);
  is("limits.", "max_query_len", "max_seqlen_q", nullptr, o.limits.max_query_len);
  is("limits.", "max_workspace", nullptr, nullptr, o.limits.max_workspace);
  is("limits.", "max_qq_gradient", "max_qq_gradient", nullptr, o.limits.max_qq_gradient);
  is("limits.", "dense_keys", nullptr, nullptr, o.limits.dense_keys);

  is("", "invariant", "invariant", "--invariant", o.invariant);
  is("", "gradients", "gradients", nullptr, o.gradients);
  is("", "dout", "dout", nullptr, o.dout);
  is("debug.", "check_arrays", "check_arrays", nullptr, o.debug.check_arrays);
  is("debug.", "profile", "profile", nullptr, o.debug.profile,
     "a rank may time its own phases; what travels is the same");
  is("", "strategy", "strategy", "--strategy", o.strategy);
  is("", "ranks_per_node", "ranks_per_node", "--ranks-per-node", o.ranks_per_node);
  is("", "exchange", "exchange", "--exchange", o.exchange);
  is("", "threads", "threads", "--threads", o.threads,
     "how many threads a rank has changes no bit and nothing that travels");

  is("", "keys", "keys", "--shard", o.keys);
  is("", "queries", "queries", "--shard-queries", o.queries);
  is("", "results", "results", nullptr, o.results);
}

// ---- arguments of a run -----------------------------------------------------------------------

/// How ranks compare an argument of a run.
enum class Compared : std::uint8_t {
  contents,  ///< whether it is given, and what it holds
  given,     ///< whether it is given
  ranges,    ///< its contents, if it has the ranges of all ranks
  number,    ///< as a number, in runs that read it
  own,       ///< not at all, or in part: `own` says which
};

/// One argument of a run.
struct ArgumentInfo {
  const char* name;    ///< the member of AttentionArgs
  const char* python;  ///< in the call of a longspan.Attention; null: Python has none
  Compared compared;   ///< how ranks compare it
  const char* own;     ///< which part is a rank's own, and why; null: none
};

/// Calls visit(ArgumentInfo, member) for every argument. `Args` is AttentionArgs, const or not.
template <class Args, class Visit>
constexpr void visit_arguments(Args& a, const Visit& visit) {
  using enum Compared;
  const auto is = [&](const char* name, const char* python, Compared compared, auto& member,
                      const char* why = nullptr) {
    visit(ArgumentInfo{name, python, compared, why}, member);
  };
  is("q", "q", own, a.q, "its strides; rows, heads, head_dim and type are compared");
  is("k", "k", own, a.k, "every rank has keys of its own, as the layout says");
  is("v", "v", own, a.v, "as k");
  is("out", "out", own, a.out, "where the result goes; its type is an option");
  is("lse", "lse", own, a.lse, "a rank may leave it out");
  is("total_keys", "total_keys", number, a.total_keys);
  is("total_tokens", "total_queries", number, a.total_tokens);
  is("query_start", "cu_seqlens_q", contents, a.query_start);
  is("kv_len", "cache_seqlens", contents, a.kv_len);
  is("causal", "causal", contents, a.causal);
  is("block_table", "block_table", given, a.block_table,
     "pages are a rank's own; whether there is a table is compared");
  is("key_table", "key_table", ranges, a.key_table);
  is("query_table", "query_table", ranges, a.query_table);
  is("new_k", "k_new", given, a.new_k);
  is("new_v", "v_new", given, a.new_v);
  is("rope_cos", "rotary_cos", given, a.rope_cos,
     "its values, whose comparison would read a whole table; whether it is given is compared");
  is("rope_sin", "rotary_sin", given, a.rope_sin, "as rope_cos");
  is("q_scale", "q_descale", contents, a.q_scale);
  is("k_scale", "k_descale", contents, a.k_scale);
  is("v_scale", "v_descale", contents, a.v_scale);
  is("out_scale", "out_scale", contents, a.out_scale);
  is("sinks", "sinks", contents, a.sinks);
  is("slopes", "alibi_slopes", contents, a.slopes);
  is("qq_bias", "qq_bias", contents, a.qq_bias);
  is("documents", "documents", contents, a.documents);
  is("bidirectional", "bidirectional", contents, a.bidirectional);
  is("prefix_len", "prefix_lens", contents, a.prefix_len);
  is("left_padding", "cache_leftpad", contents, a.left_padding);
  is("query_len", "seqused_q", contents, a.query_len);
  is("indices", "indices", contents, a.indices);
  is("index_len", "topk_length", contents, a.index_len);
  is("skip_decode", "skip_decode", number, a.skip_decode);
  is("dropout_seed", "dropout_seed", contents, a.dropout_seed);
  is("dropout_sequences", "dropout_sequences", contents, a.dropout_sequences);
}

}  // namespace longspan
