#include "src/agreement/agreement.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "longspan/element.hpp"
#include "longspan/option_table.hpp"
#include "longspan/storage.hpp"
#include "src/arguments/array_checks.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {
namespace {

/// A checked array of one or two dimensions, as the digest reads it; or of three, whose last two
/// are dense.
kernels::DigestArray digest_array(const Tensor& t) {
  if (t.dims == 3)
    return {t.data, t.shape[1] * t.shape[2], t.shape[0], t.stride[0],
            static_cast<int>(size_of(t.dtype))};
  const bool matrix = t.dims == 2, repeats = matrix && t.stride[1] == 0;  // one scale of a row
  return {t.data, repeats ? std::min<std::int64_t>(1, t.shape[1]) : t.shape[matrix ? 1 : 0],
          matrix ? t.shape[0] : 1, matrix ? t.stride[0] : 0, static_cast<int>(size_of(t.dtype))};
}

}  // namespace

std::vector<OwnField> own_fields() {
  std::vector<OwnField> all;
  const Options options;
  visit_options(options, [&](const OptionInfo& option, const auto&) {
    if (option.own != nullptr) all.push_back({"Options::" + option.member(), option.own});
  });
  const AttentionArgs args;
  visit_arguments(args, [&](const ArgumentInfo& argument, const auto&) {
    if (argument.own != nullptr)
      all.push_back({std::string("AttentionArgs::") + argument.name, argument.own});
  });
  // Those of merges and reshards.
  all.insert(
      all.end(),
      {{"MergeOptions::threads", "as Options::threads"},
       {"MergeArgs::part", "every rank has a part of its own; its number of tokens is compared"},
       {"MergeArgs::part_lse", "as part"},
       {"MergeArgs::part_scale", "as part; its scale travels with it"},
       {"MergeArgs::out", "where the result goes; its type is an option"},
       {"MergeArgs::lse", "a rank may leave it out"},
       {"ReshardOptions::threads", "as Options::threads"},
       {"ReshardArgs::from", "every rank has a part of its own, in a form of its own"},
       {"ReshardArgs::to", "as from"}});
  return all;
}

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

void RunDescription::array(const char* name, const Tensor& values) {
  if (!values) return;
  if (is_float(values.dtype)) number(name, static_cast<std::int64_t>(values.dtype), Kind::dtype);
  Array& array = arrays_.at(array_count_++) = {name, digest_array(values), values.dtype, {}, 0};
  if (!reads_arrays_) return;
  array.shown = static_cast<int>(std::min<std::int64_t>(array.where.size(), Array::kShown));
  for (int i = 0; i < array.shown; ++i) array.first[i] = array.where.bits(i);
}

RunDescription::RunDescription(const AttentionArgs& args, const Options& o, Backward backward) {
  // Arguments that are always compared come first, so that lists of two ranks stay aligned until a
  // value differs.
  visit_arguments(args, [&]<class T>(const ArgumentInfo& argument, const T& value) {
    const bool asked =
        argument.compared == Compared::contents || argument.compared == Compared::given;
    if constexpr (std::is_same_v<T, Tensor>)
      if (asked) number(argument.name, static_cast<bool>(value), Kind::given);
  });
  number("batch", batch_of(args.kv_len));
  number("skip_decode", args.skip_decode, Kind::yes_no);
  if (o.queries)
    number("total_tokens", args.total_tokens);
  else
    number("rows of q", count_rows(args.q));
  if (!args.kv_len) number("total_keys", args.total_keys);
  if (args.indices) {
    number("indices.columns", args.indices.shape[args.indices.dims - 1]);
    number("indices.kv_heads", args.indices.dims == 3 ? args.indices.shape[1] : 1);
  }
  if (o.gradients || backward.yes) number("backward", backward.yes, Kind::yes_no);
}

RunDescription::RunDescription(const AttentionArgs& args, const Options& o)
    : RunDescription(args, o, Backward{false}) {}

RunDescription::RunDescription(const GradientArgs& args, const Options& o)
    : RunDescription(args.run, o, Backward{true}) {
  number("dout", static_cast<std::int64_t>(args.dout.dtype), Kind::dtype);
  number("dsinks", static_cast<bool>(args.dsinks), Kind::given);
  number("dslopes", static_cast<bool>(args.dslopes), Kind::given);
  number("dqq_bias", static_cast<bool>(args.dqq_bias), Kind::given);
  number("dk_before_rope", args.dk_before_rope, Kind::yes_no);
}

void RunDescription::add_arrays(const AttentionArgs& args, const Options& o, bool reads_arrays) {
  reads_arrays_ = reads_arrays;
  const Layout rows = o.queries ? o.queries->layout : o.results.rows.layout;
  visit_arguments(args, [&]<class T>(const ArgumentInfo& argument, const T& value) {
    if constexpr (std::is_same_v<T, Tensor>) {
      const Layout layout = &value == &args.key_table ? o.keys.layout : rows;
      const bool of_all = argument.compared == Compared::ranges && layout == Layout::ranges;
      const bool of_indices = &value == &args.indices || &value == &args.index_len;
      if (of_indices && o.indices.slots) return;
      if (argument.compared == Compared::contents || of_all) array(argument.name, value);
    }
  });
  if (args.qq_bias) number("qq_bias.width", args.qq_bias.shape[0]);
  if (args.documents) number("documents.count", args.documents.shape[args.documents.dims - 1] - 1);
  if (args.bidirectional)
    number("bidirectional.count", args.bidirectional.shape[args.bidirectional.dims - 2]);
}

RunDescription::RunDescription(const AttentionArgs& args, const Options& o, bool reads_arrays)
    : RunDescription(args, o) {
  add_arrays(args, o, reads_arrays);
}

RunDescription::RunDescription(const GradientArgs& args, const Options& o, bool reads_arrays)
    : RunDescription(args, o) {
  add_arrays(args.run, o, reads_arrays);
}

RunDescription::RunDescription(const MergeArgs& args) {
  number("out_scale", bool{args.out_scale}, Kind::given);
  number("tokens", count_rows(args.part));
}

RunDescription::RunDescription(const MergeArgs& args, const MergeOptions& options,
                               bool reads_arrays)
    : RunDescription(args) {
  reads_arrays_ = reads_arrays;
  if (!options.scatter_heads) array("out_scale", args.out_scale);
}

std::uint64_t RunDescription::hash() const {
  // The values before a field determine which field comes next, so the names need no part in it.
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
    if (is_float(array.dtype))
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
  hash_ = kernels::mix(hash_);  // the end of the value; the values before determine the names
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
