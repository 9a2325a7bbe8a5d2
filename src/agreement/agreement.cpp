#include "src/agreement/agreement.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>
#include <vector>

#include "longspan/element.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {
namespace {

constexpr OwnField kOwnFields[] = {
    {"Options::threads", "how many threads a rank has changes no bit and nothing that travels"},
    {"Options::debug.profile", "a rank may time its own phases; what travels is the same"},
    {"AttentionArgs::q", "its strides; rows, heads, head_dim and type are compared"},
    {"AttentionArgs::k", "every rank has keys of its own, as the layout says"},
    {"AttentionArgs::v", "as k"},
    {"AttentionArgs::out", "where the result goes; its type is an option"},
    {"AttentionArgs::lse", "a rank may leave it out"},
    {"AttentionArgs::block_table", "pages are a rank's own; whether there is a table is compared"},
    {"MergeOptions::threads", "as Options::threads"},
    {"MergeArgs::part", "every rank has a part of its own; its number of tokens is compared"},
    {"MergeArgs::part_lse", "as part"},
    {"MergeArgs::part_scale", "as part; its scale travels with it"},
    {"MergeArgs::out", "where the result goes; its type is an option"},
    {"MergeArgs::lse", "a rank may leave it out"},
    {"ReshardOptions::threads", "as Options::threads"},
    {"ReshardArgs::from", "every rank has a part of its own, in a form of its own"},
    {"ReshardArgs::to", "as from"},
};

}  // namespace

std::span<const OwnField> own_fields() { return kOwnFields; }

NamedValues describe(const MergeOptions& o, LogBase base) {
  const auto yes_no = [](bool yes) { return yes ? "true" : "false"; };
  return {{"heads", fmt::to_string(o.heads)},
          {"value_dim", fmt::to_string(o.value_dim)},
          {"dtype", name(o.dtype)},
          {"out_dtype", name(o.of_out())},
          {"base", base == LogBase::e ? "e" : "two"},
          {"max_tokens", fmt::to_string(o.max_tokens)},
          {"scatter_heads", yes_no(o.scatter_heads)},
          {"nan_is_empty", yes_no(o.nan_is_empty)}};
}

void RunDescription::number(const char* name, std::int64_t value, Kind kind) {
  values_.at(count_++) = {name, value, kind};
}

void RunDescription::array(const char* name, const kernels::DigestArray& where, char type,
                           DType dtype) {
  if (where.data == nullptr) return;
  if (type == 'f') number(name, static_cast<std::int64_t>(dtype), Kind::dtype);
  Array& array = arrays_.at(array_count_++) = {name, where, type, dtype, {}, 0};
  if (!reads_arrays_) return;
  array.shown = static_cast<int>(std::min<std::int64_t>(where.size(), Array::kShown));
  for (int i = 0; i < array.shown; ++i) array.first[i] = where.bits(i);
}

/// Adds the bounds of every rank. A listed table is one rank's own (listed_positions.hpp).
void RunDescription::table(const char* name, const Shard& shard, std::int64_t batch) {
  const std::int64_t ends = std::int64_t{shard.ranks} + 1;
  if (shard.layout == Layout::ranges) array(name, {shard.table, ends, batch, ends, 8}, 'i');
}

RunDescription::RunDescription(const AttentionArgs& args, const Options& o) {
  // What is always asked comes first, so that lists of two ranks go on alike until a value differs.
  const auto given = [&](const char* name, const Tensor& tensor) {
    number(name, static_cast<bool>(tensor), Kind::given);
  };
  given("query_start", args.query_start);
  given("kv_len", args.kv_len);
  given("causal", args.causal);
  given("block_table", args.block_table);
  given("new_k", args.new_k);
  given("new_v", args.new_v);
  given("q_scale", args.q_scale);
  given("k_scale", args.k_scale);
  given("v_scale", args.v_scale);
  given("out_scale", args.out_scale);
  given("sinks", args.sinks);
  given("slopes", args.slopes);
  given("qq_bias", args.qq_bias);
  given("documents", args.documents);
  number("batch", batch_of(args.kv_len));
  number("skip_decode", args.skip_decode, Kind::yes_no);
  if (o.queries)
    number("total_tokens", args.total_tokens);
  else
    number("rows of q", count_rows(args.q));
  if (!args.kv_len) number("total_keys", args.total_keys);
}

RunDescription::RunDescription(const AttentionArgs& args, const RunArrays& a, const Options& o,
                               bool reads_arrays)
    : RunDescription(args, o) {
  reads_arrays_ = reads_arrays;
  table("key_table", a.keys, a.batch);
  table("query_table", a.queries, 1);
  array("query_start", {a.query_start, std::int64_t{a.batch} + 1, 1, 0, 4}, 'i');
  array("kv_len", {a.kv_len, a.batch, 1, 0, 4}, 'i');
  array("causal", {a.causal, a.batch, 1, 0, 1}, 'u');
  for (const auto& [name, scales] :
       {std::pair{"q_scale", a.q_scale}, std::pair{"k_scale", a.k_scale},
        std::pair{"v_scale", a.v_scale}})
    array(name, {scales.data, scales.per_head ? o.kv_heads : 1, 1, 0, 4}, 'f');
  array("out_scale", {a.out_scale, 1, 1, 0, 4}, 'f');
  for (const auto& [name, floats] : {std::pair{"sinks", a.sinks}, std::pair{"slopes", a.slopes}})
    array(name, {floats.data, o.heads, 1, 0, static_cast<int>(size_of(floats.dtype))}, 'f',
          floats.dtype);
  const QqBias& qq = a.qq_bias;
  array("qq_bias",
        {qq.values.data, qq.width, qq.width, qq.row_stride,
         static_cast<int>(size_of(qq.values.dtype))},
        'f', qq.values.dtype);
  if (qq) number("qq_bias.width", qq.width);
  array("documents", {a.documents.start, a.documents.count + 1, 1, 0, 8}, 'i');
  if (a.documents) number("documents.count", a.documents.count);
}

RunDescription::RunDescription(const MergeArgs& args) {
  number("out_scale", bool{args.out_scale}, Kind::given);
  number("tokens", count_rows(args.part));
}

RunDescription::RunDescription(const MergeArgs& args, const MergeOptions& options,
                               bool reads_arrays)
    : RunDescription(args) {
  reads_arrays_ = reads_arrays;
  if (!options.scatter_heads) array("out_scale", {args.out_scale.data, 1, 1, 0, 4}, 'f');
}

std::uint64_t RunDescription::hash() const {
  // Which field comes next follows from the values before it, so the names need no part in it.
  std::uint64_t hash = 0;
  for (int i = 0; i < count_; ++i)
    hash = kernels::mix(hash + static_cast<std::uint64_t>(values_[i].value) + 1);
  for (int i = 0; i < array_count_; ++i)
    hash = kernels::mix(hash + static_cast<std::uint64_t>(arrays_[i].where.size()));
  return hash;
}

kernels::DigestParams RunDescription::arrays(std::uint64_t* words, std::uint64_t stamp) const {
  kernels::DigestParams p;
  p.stamp = stamp;
  p.count = array_count_;
  p.words = words;
  for (int i = 0; i < array_count_; ++i) p.arrays[i] = arrays_[i].where;
  return p;
}

std::string RunDescription::text_of(const Value& value) const {
  switch (value.kind) {
    case Kind::number:
      return fmt::to_string(value.value);
    case Kind::yes_no:
      return value.value ? "true" : "false";
    case Kind::given:
      return value.value ? "given" : "not given";
    default:
      return longspan::name(static_cast<DType>(value.value));
  }
}

std::string RunDescription::text_of(const Array& array, Digests digests,
                                    std::uint64_t digest) const {
  std::vector<std::string> shown;
  for (int i = 0; i < array.shown; ++i) {
    const std::uint64_t bits = array.first[i];
    if (array.type == 'f')
      shown.push_back(fmt::to_string(load_element(&bits, array.dtype, 0)));
    else if (array.where.unit == 4)
      shown.push_back(fmt::to_string(static_cast<std::int32_t>(bits)));
    else
      shown.push_back(fmt::to_string(static_cast<std::int64_t>(bits)));
  }
  if (array.shown == array.where.size()) return fmt::format("[{}]", fmt::join(shown, ", "));
  if (digests == Digests::awaited) return comm::kNotKnown;
  std::string text = fmt::format("{} values", array.where.size());
  if (!shown.empty()) text = fmt::format("[{}, ...], {}", fmt::join(shown, ", "), text);
  return digests == Digests::none ? text : text + fmt::format(" with digest {:016x}", digest);
}

NamedValues RunDescription::text(const std::uint64_t* words, std::uint64_t stamp) const {
  Digests digests = Digests::none;
  if (words != nullptr) {  // a GPU may still write them
    std::uint64_t& last = const_cast<std::uint64_t*>(words)[array_count_ + 1];
    const std::uint64_t found = std::atomic_ref(last).load(std::memory_order_acquire);
    digests = found == stamp ? Digests::there : Digests::awaited;
  }
  NamedValues named;
  for (int i = 0; i < count_; ++i) {
    std::string name = values_[i].name;
    if (values_[i].kind == Kind::dtype) name += " (type)";
    named.emplace_back(std::move(name), text_of(values_[i]));
  }
  for (int i = 0; i < array_count_; ++i)
    named.emplace_back(
        arrays_[i].name,
        text_of(arrays_[i], digests, digests == Digests::there ? words[i] : std::uint64_t{0}));
  return named;
}

std::uint32_t RunHistory::add(const RunDescription& description) {
  if (++last_ == 0) ++last_;
  runs_[last_ % kRuns] = description;
  return last_;
}

std::uint64_t* RunHistory::words(std::uint32_t run) const {
  return words_ ? words_.get() + std::size_t{run % kRuns} * kWordsOfRun : nullptr;
}

RunHistory::RunHistory(NamedValues made_with) {
  for (auto& [name, value] : made_with) add_option(std::move(name), std::move(value));
}

void RunHistory::set_layer(std::uint32_t number) {
  add_option("layer", fmt::format("number {}", number));
}

void RunHistory::add_option(std::string name, std::string value) {
  for (const char letter : value)
    hash_ = kernels::mix(hash_ + static_cast<unsigned char>(letter) + 1);
  hash_ = kernels::mix(hash_);  // the end of the value; names follow from the values before them
  made_with_.emplace_back(std::move(name), std::move(value));
}

NamedValues RunHistory::describe(std::uint32_t run) const {
  if (run == 0) return made_with_;
  if (run > last_ || last_ - run >= kRuns) return {};
  return describe(run, runs_[run % kRuns].text(words(run), run));
}

NamedValues RunHistory::describe_next(const RunDescription& refused) const {
  return describe(last_ + 1, refused.text(nullptr, 0));
}

NamedValues RunHistory::describe(std::uint32_t run, NamedValues given) const {
  NamedValues all = made_with_;
  all.emplace_back("run of the layer", fmt::format("number {}", run));
  std::move(given.begin(), given.end(), std::back_inserter(all));
  return all;
}

}  // namespace longspan
