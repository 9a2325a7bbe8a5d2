// Every field of Options and AttentionArgs, of MergeOptions and MergeArgs, and of ReshardOptions
// and ReshardArgs, is either compared between ranks or listed as one that may differ. The fields
// are read from the headers themselves, so that a new one that is neither fails here.
#include "src/agreement/agreement.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "comm/control/control.hpp"
#include "kernels/backend.hpp"
#include "longspan/error.hpp"
#include "src/arguments/array_checks.hpp"
#include "src/arguments/validate.hpp"
#include "src/reshard/check_reshard.hpp"

namespace longspan {
namespace {

using Named = std::pair<std::string, std::string>;

// ---- the fields in the headers
// ----------------------------------------------------------------------

/// All public headers.
const std::string& headers() {
  static const std::string all = [] {
    std::stringstream text;
    const std::string folder = std::string(LONGSPAN_SOURCE_DIR) + "/src/longspan";
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      text << std::ifstream(entry.path()).rdbuf() << "\n";
    return text.str();
  }();
  return all;
}

std::size_t place_of(const std::string& structure) {
  return headers().find("struct " + structure + " {");
}

/// The statements in a structure's body, without comments; "~" replaces code in braces. A
/// function's body ends its statement.
std::vector<std::string> statements_of(const std::string& structure) {
  const std::string& text = headers();
  std::size_t at = place_of(structure);
  EXPECT_NE(at, std::string::npos) << structure;
  if (at == std::string::npos) return {};
  std::vector<std::string> all;
  std::string statement;
  int depth = 1;
  for (at = text.find('{', at) + 1; depth > 0 && at < text.size(); ++at) {
    const char c = text[at];
    if (text.compare(at, 2, "//") == 0) at = text.find('\n', at);
    if (c == '{') ++depth;
    if (c == '}') --depth;
    if (depth > 1 || c == '/') continue;
    statement += c == '}' ? '~' : c;
    const bool is_function = statement.find('(') < statement.find('=');
    if (c == ';' || (c == '}' && is_function)) {
      if (!is_function) all.push_back(statement);
      statement.clear();
    }
  }
  return all;
}

struct Field {
  std::string type, name;
  bool optional = false;
};

/// The members of `structure`: the names before each `=`, `~` and comma.
std::vector<Field> fields_of(const std::string& structure) {
  std::vector<Field> fields;
  for (const std::string& statement : statements_of(structure)) {
    if (statement.find("constexpr") != std::string::npos) continue;
    if (statement.find("operator") != std::string::npos) continue;
    Field field;
    std::string word, inner;  // inner: template arguments
    int angles = 0;
    bool initialiser = false;
    for (const char c : statement) {
      const bool in_word = std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == ':';
      const bool ends = angles == 0 && (c == ',' || c == ';');
      if (!initialiser && c == '<') ++angles;
      if (!initialiser && in_word) (angles > 0 ? inner : word) += c;
      if (!initialiser && angles == 0 && !in_word && !word.empty()) {
        if (!field.name.empty()) field.type = field.name;
        field.name = word;
        word.clear();
      }
      if (!initialiser && c == '>') --angles;
      if (c == '=' || c == '~') initialiser = true;
      if (!ends) continue;
      if (field.type == "std::optional") field.type = inner, field.optional = true;
      fields.push_back(field);
      field.name.clear();
      initialiser = false;
    }
  }
  return fields;
}

std::vector<std::string> names_of(const std::string& structure) {
  std::vector<std::string> names;
  for (const Field& field : fields_of(structure)) names.push_back(field.name);
  return names;
}

/// The members of Options, with the members of a group in its place: "mask.window".
std::vector<std::string> option_fields(const std::string& structure = "Options",
                                       const std::string& prefix = "") {
  std::vector<std::string> names;
  for (const Field& field : fields_of(structure)) {
    const bool group = place_of(field.type) != std::string::npos;
    if (!group || field.optional) names.push_back(prefix + field.name);
    if (!group) continue;
    for (const std::string& name : option_fields(field.type, prefix + field.name + "."))
      names.push_back(name);
  }
  return names;
}

std::set<std::string> own_names() {
  std::set<std::string> names;
  for (const OwnField& field : own_fields()) names.insert(field.name);
  return names;
}

TEST(Agreement, TheReaderOfHeadersFindsWhatIsThere) {
  using testing::ElementsAre;
  EXPECT_THAT(names_of("Mask"), ElementsAre("causal", "window", "right", "chunk", "lookback",
                                            "prefix", "clamp_ranges", "alignment"));
  EXPECT_THAT(names_of("DTypes"), ElementsAre("compute", "query", "kv", "out", "tf32",
                                              "fp8_products", "bf16_products"));
  EXPECT_THAT(names_of("Sharding"), ElementsAre("layout", "block"));
  EXPECT_THAT(names_of("AttentionArgs"),
              testing::IsSupersetOf({"q", "new_v", "v_scale", "query_table", "skip_decode"}));
  std::map<std::string, std::string> types;
  for (const Field& field : fields_of("AttentionArgs")) types[field.name] = field.type;
  EXPECT_EQ(types["new_v"], "Tensor");
  EXPECT_EQ(types["lse"], "Lse");
  EXPECT_EQ(types["total_tokens"], "std::int64_t");
  EXPECT_THAT(option_fields(),
              testing::IsSupersetOf({"heads", "dtypes.compute", "dtypes.fp8_products",
                                     "mask.window", "score.alibi", "limits.max_kv_len",
                                     "keys.layout", "queries", "queries.block", "debug.profile"}));
  EXPECT_THAT(option_fields(), testing::Not(testing::Contains("limits")));
}

// ---- options -----------------------------------------------------------------------------------

using ChangeOptions = std::function<void(Options&)>;
struct OptionCase {
  ChangeOptions change;
  ChangeOptions before = [](Options&) {};  // what both have
};

const std::map<std::string, OptionCase> kOptions{
    {"heads", {[](Options& o) { o.heads = 8; }}},
    {"kv_heads", {[](Options& o) { o.kv_heads = 2; }}},
    {"head_dim", {[](Options& o) { o.head_dim = 128; }}},
    {"value_dim", {[](Options& o) { o.value_dim = 24; }}},
    {"values_in_keys", {[](Options& o) { o.values_in_keys = true; }}},
    {"dtypes.compute",
     {[](Options& o) { o.dtypes.compute = fp16; },
      [](Options& o) { o.dtypes.query = o.dtypes.kv = o.dtypes.out = e4m3; }}},
    {"dtypes.query", {[](Options& o) { o.dtypes.query = e4m3; }}},
    {"dtypes.kv", {[](Options& o) { o.dtypes.kv = e4m3; }}},
    {"dtypes.out", {[](Options& o) { o.dtypes.out = e4m3; }}},
    {"dtypes.tf32", {[](Options& o) { o.dtypes.tf32 = true; }}},
    {"dtypes.fp8_products", {[](Options& o) { o.dtypes.fp8_products = true; }}},
    {"dtypes.bf16_products", {[](Options& o) { o.dtypes.bf16_products = true; }}},
    {"mask.causal", {[](Options& o) { o.mask.causal = true; }}},
    {"mask.window", {[](Options& o) { o.mask.window = 7; }}},
    {"mask.right", {[](Options& o) { o.mask.right = 7; }}},
    {"mask.chunk", {[](Options& o) { o.mask.chunk = 7; }}},
    {"mask.lookback", {[](Options& o) { o.mask.lookback = 7; }}},
    {"mask.prefix", {[](Options& o) { o.mask.prefix = 7; }}},
    {"mask.clamp_ranges", {[](Options& o) { o.mask.clamp_ranges = true; }}},
    {"mask.alignment", {[](Options& o) { o.mask.alignment = Alignment::upper_left; }}},
    {"score.scale", {[](Options& o) { o.score.scale = 0.5f; }}},
    {"score.softcap", {[](Options& o) { o.score.softcap = 30; }}},
    {"score.alibi", {[](Options& o) { o.score.alibi = Alibi::query; }}},
    {"rope.dim", {[](Options& o) { o.rope.dim = 8; }}},
    {"rope.interleaved", {[](Options& o) { o.rope.interleaved = true; }}},
    {"rope.base", {[](Options& o) { o.rope.base = 500; }}},
    {"rope.scale", {[](Options& o) { o.rope.scale = 2; }}},
    {"dropout.p", {[](Options& o) { o.dropout.p = 0.5; }}},
    {"dropout.first_head", {[](Options& o) { o.dropout.first_head = 8; }}},
    {"indices.top_k", {[](Options& o) { o.indices.top_k = 8; }}},
    {"indices.slots", {[](Options& o) { o.indices.slots = true; }}},
    {"limits.max_tokens", {[](Options& o) { o.limits.max_tokens = 5; }}},
    {"limits.max_batch", {[](Options& o) { o.limits.max_batch = 5; }}},
    {"limits.max_kv_len", {[](Options& o) { o.limits.max_kv_len = 5; }}},
    {"limits.max_total_keys", {[](Options& o) { o.limits.max_total_keys = 5; }}},
    {"limits.max_query_len", {[](Options& o) { o.limits.max_query_len = 5; }}},
    {"ranks_per_node", {[](Options& o) { o.ranks_per_node = 2; }}},
    {"limits.max_qq_gradient", {[](Options& o) { o.limits.max_qq_gradient = 5; }}},
    {"limits.max_workspace", {[](Options& o) { o.limits.max_workspace = 1 << 30; }}},
    {"limits.dense_keys", {[](Options& o) { o.limits.dense_keys = true; }}},
    {"keys.layout", {[](Options& o) { o.keys.layout = Layout::zigzag; }}},
    {"keys.block",
     {[](Options& o) { o.keys.block = 64; },
      [](Options& o) { o.keys.layout = Layout::interleaved; }}},
    {"queries", {[](Options& o) { o.queries = Sharding{}; }}},
    {"queries.layout",
     {[](Options& o) { o.queries->layout = Layout::striped; },
      [](Options& o) { o.queries = Sharding{}; }}},
    {"queries.block",
     {[](Options& o) { o.queries->block = 64; },
      [](Options& o) { o.queries = Sharding{Layout::interleaved}; }}},
    {"results.part", {[](Options& o) { o.results.part = ResultPart::heads; }}},
    {"results.rows.layout",
     {[](Options& o) { o.results.rows.layout = Layout::striped; },
      [](Options& o) { o.results.part = ResultPart::rows; }}},
    {"results.rows.block",
     {[](Options& o) { o.results.rows.block = 64; },
      [](Options& o) {
        o.results = {ResultPart::rows, {Layout::interleaved}};
      }}},
    {"invariant", {[](Options& o) { o.invariant = true; }}},
    {"gradients", {[](Options& o) { o.gradients = true; }}},
    {"dout", {[](Options& o) { o.dout = Dout::partial; }}},
    {"strategy", {[](Options& o) { o.strategy = "gather-states"; }}},
    {"exchange", {[](Options& o) { o.exchange = Exchange::gather; }}},
    {"threads", {[](Options& o) { o.threads = 3; }}},
    {"debug.check_arrays", {[](Options& o) { o.debug.check_arrays = true; }}},
    {"debug.profile", {[](Options& o) { o.debug.profile = true; }}},
};

TEST(Agreement, EveryOptionIsComparedOrMayDiffer) {
  const std::vector<std::string> fields = option_fields();
  const std::set<std::string> own = own_names();
  for (const std::string& field : fields) {
    const auto found = kOptions.find(field);
    ASSERT_NE(found, kOptions.end())
        << "Options::" << field << " is new: compare it in describe(), or put it on the list of "
        << "own_fields() with the reason; then add it to this test";
    Options plain;
    found->second.before(plain);
    Options changed = plain;
    found->second.change(changed);
    if (own.count("Options::" + field))
      EXPECT_EQ(describe(changed), describe(plain)) << field;
    else
      EXPECT_NE(describe(changed), describe(plain)) << field;
  }
  EXPECT_EQ(fields.size(), kOptions.size());
}

// ---- runs --------------------------------------------------------------------------------------

/// The hash that travels, contents of arrays included, as a layer on CPUs makes it.
std::uint64_t run_digest_of(const RunDescription& run) {
  std::vector<std::uint64_t> words(RunHistory::kWordsOfRun);
  const kernels::DigestParams arrays = run.arrays(words.data(), 1);
  kernels::host_backend(1)->digest(arrays, {});
  return kernels::run_digest(run.hash(), words.data() + arrays.count);
}

/// The kinds of runs. Not every argument can be combined with every other.
enum class Of { batch, one_sequence, one_length, sharded_queries };

/// A run with all arguments that can be combined, whose arrays live here.
struct Everything {
  static constexpr int kHeads = 4, kDim = 16, kTokens = 4, kRanks = 2;
  std::vector<float> q = std::vector<float>(kTokens * kHeads * kDim), out = q, keys = q;
  std::vector<std::int32_t> start{0, 2, 4}, lens{20, 30}, pages{0, 1};
  std::vector<std::uint8_t> causal{1, 0};
  std::vector<float> q_scales{1, 2, 3, 4}, k_scales{2, 3, 4, 5}, v_scales{3, 4, 5, 6};
  std::vector<float> sinks{1, 2, 3, 4}, slopes{5, 6, 7, 8}, out_scale{2};
  std::vector<float> bias = std::vector<float>(kTokens * kTokens, 0.5f);
  std::vector<float> angles = std::vector<float>(40 * kDim / 2, 0.5f);
  std::vector<std::int32_t> padding{1, 2}, used{2, 1}, numbers{0, 1}, named_len{1, 2, 3, 0};
  std::vector<std::int32_t> named = std::vector<std::int32_t>(kTokens * kHeads * 3, 5);
  std::vector<std::int64_t> seed{5, 6};
  std::vector<std::int64_t> documents{0, 3, 9, 2, 3, 3}, ranges{0, 10, 20, 0, 10, 30},
      rows{0, 2, 4}, images{0, 5, 5, 5, 2, 3, 4, 8};
  std::vector<std::int32_t> prefix{4, 5};
  Options options{.heads = kHeads,
                  .kv_heads = kHeads,
                  .head_dim = kDim,
                  .dtypes = {.compute = fp32},
                  .mask = {.prefix = 5},
                  .rope = {.dim = kDim},
                  .indices = {.top_k = 3},
                  .limits = {.max_tokens = kTokens, .max_batch = 2},
                  .keys = {Layout::ranges}};
  AttentionArgs args;
  int rank = 0;

  explicit Everything(Of kind = Of::batch) {
    const int batch = kind == Of::batch ? 2 : 1;
    if (batch == 1)
      start = {0, 4}, lens = {20}, ranges = {0, 10, 20}, causal = {1}, documents = {0, 3, 9},
      padding = {1}, used = {2}, numbers = {1}, images = {0, 5, 5, 5}, prefix = {4};
    AttentionArgs& a = args;
    a.q = Tensor(q.data(), {kTokens, kHeads, kDim});
    a.k = a.v = a.new_k = a.new_v = Tensor(keys.data(), {kTokens, kHeads, kDim});
    a.out = Tensor(out.data(), {kTokens, kHeads, kDim});
    a.query_start = Tensor(start.data(), {batch + 1});
    if (kind == Of::one_length)
      a.total_keys = 20;
    else
      a.kv_len = Tensor(lens.data(), {batch});
    a.block_table = Tensor(pages.data(), {batch, 1});
    a.key_table = batch == 1 ? Tensor(ranges.data(), {kRanks + 1})
                             : Tensor(ranges.data(), {batch, kRanks + 1});
    if (kind == Of::sharded_queries) {
      options.queries = Sharding{Layout::ranges};
      a.total_tokens = kTokens;
      a.query_table = Tensor(rows.data(), {kRanks + 1});
    }
    a.q_scale = Tensor(q_scales.data(), {kHeads});
    a.k_scale = Tensor(k_scales.data(), {kHeads});
    a.v_scale = Tensor(v_scales.data(), {kHeads});
    a.out_scale = Tensor(out_scale.data(), {1});
    a.sinks = Tensor(sinks.data(), {kHeads});
    a.slopes = Tensor(slopes.data(), {kHeads});
    a.qq_bias = Tensor(bias.data(), {kTokens, kTokens});
    a.causal = Tensor(causal.data(), {batch});
    a.documents = Tensor(documents.data(), {batch, 3});
    a.bidirectional = Tensor(images.data(), {batch, 2, 2});
    a.prefix_len = Tensor(prefix.data(), {batch});
    a.left_padding = Tensor(padding.data(), {batch});
    a.query_len = Tensor(used.data(), {batch});
    if (kind == Of::sharded_queries) {
      options.indices = {};
    } else {
      a.indices = Tensor(named.data(), {kTokens, kHeads, 3});
      a.index_len = Tensor(named_len.data(), {kTokens});
    }
    a.rope_cos = a.rope_sin = Tensor(angles.data(), {40, kDim / 2});
    a.dropout_seed = Tensor(seed.data(), {2});
    a.dropout_sequences = Tensor(numbers.data(), {batch});
  }
  Everything(const Everything&) = delete;

  RunDescription described() const {
    arrays_of(args, options, rank, kRanks, Device::host);  // checks them
    return {args, options, true};
  }
  std::uint64_t digest() const { return run_digest_of(described()); }
  NamedValues text() const { return described().text(nullptr, 0); }

  /// The arrays whose contents are compared.
  std::map<std::string, std::span<std::byte>> contents() {
    const auto bytes = [](auto& values) { return std::as_writable_bytes(std::span(values)); };
    std::map<std::string, std::span<std::byte>> all{{"query_start", bytes(start)},
                                                    {"key_table", bytes(ranges)},
                                                    {"query_table", bytes(rows)},
                                                    {"kv_len", bytes(lens)},
                                                    {"q_scale", bytes(q_scales)},
                                                    {"k_scale", bytes(k_scales)},
                                                    {"v_scale", bytes(v_scales)},
                                                    {"out_scale", bytes(out_scale)},
                                                    {"sinks", bytes(sinks)},
                                                    {"slopes", bytes(slopes)},
                                                    {"qq_bias", bytes(bias)},
                                                    {"causal", bytes(causal)},
                                                    {"documents", bytes(documents)},
                                                    {"bidirectional", bytes(images)},
                                                    {"prefix_len", bytes(prefix)},
                                                    {"left_padding", bytes(padding)},
                                                    {"query_len", bytes(used)},
                                                    {"indices", bytes(named)},
                                                    {"index_len", bytes(named_len)},
                                                    {"dropout_seed", bytes(seed)},
                                                    {"dropout_sequences", bytes(numbers)}};
    if (!args.query_table) all.erase("query_table");
    if (!args.kv_len) all.erase("kv_len");
    if (!args.indices) all.erase("indices"), all.erase("index_len");
    return all;
  }
};

struct RunCase {
  std::function<void(Everything&)> change;
  Of kind = Of::batch;
};
template <class Change>
RunCase with(Change change, Of kind = Of::batch) {
  return {change, kind};
}

const std::multimap<std::string, RunCase> kRuns{
    {"q", with([](Everything& e) { e.args.q.stride[0] += 16; })},
    {"k", with([](Everything& e) { e.args.k.shape[0] = 3; })},
    {"v", with([](Everything& e) { e.args.v.shape[0] = 3; })},
    {"out", with([](Everything& e) { e.args.out.stride[0] += 16; })},
    {"lse", with([](Everything& e) {
       e.args.lse = Lse::tokens_heads(Tensor(e.out.data(), {4, 4}));
     })},
    {"total_keys", with([](Everything& e) { e.args.total_keys = 21; }, Of::one_length)},
    {"total_tokens", with([](Everything& e) { e.args.total_tokens = 5; }, Of::sharded_queries)},
    {"query_start", with([](Everything& e) { e.args.query_start = {}; }, Of::one_sequence)},
    {"query_start", with([](Everything& e) { e.start[1] = 1; })},
    {"kv_len", with([](Everything& e) { e.args.kv_len = {}; }, Of::one_sequence)},
    {"kv_len", with([](Everything& e) { e.lens[1] = 29; })},
    {"kv_len", with([](Everything& e) {  // a batch of one sequence, whose arrays begin the same
       AttentionArgs& a = e.args;
       a.query_start.shape[0] = 2;
       a.kv_len.shape[0] = a.causal.shape[0] = a.key_table.shape[0] = 1;
       a.documents.shape[0] = a.left_padding.shape[0] = a.query_len.shape[0] = 1;
       a.dropout_sequences.shape[0] = a.bidirectional.shape[0] = a.prefix_len.shape[0] = 1;
     })},
    {"block_table", with([](Everything& e) { e.pages[0] = 1; })},
    {"block_table", with([](Everything& e) { e.args.block_table.shape[1] = 2; })},
    {"block_table", with([](Everything& e) { e.args.block_table.stride[0] = 2; })},
    {"block_table", with([](Everything& e) { e.args.block_table.stride[1] = 2; })},
    {"key_table", with([](Everything& e) { e.ranges[4] = 11; })},
    {"key_table", with([](Everything& e) { e.ranges[1] = 11; }, Of::one_length)},
    {"query_table", with([](Everything& e) { e.rows[1] = 1; }, Of::sharded_queries)},
    {"new_k", with([](Everything& e) { e.args.new_k = {}; })},
    {"new_v", with([](Everything& e) { e.args.new_v = {}; })},
    {"rope_cos", with([](Everything& e) { e.angles[3] = 0; })},
    {"rope_cos",
     with([](Everything& e) { e.args.rope_cos.shape[0] = e.args.rope_sin.shape[0] = 33; })},
    {"rope_sin", with([](Everything& e) { e.angles[3] = 0; })},
    {"q_scale", with([](Everything& e) { e.args.q_scale = {}; })},
    {"q_scale", with([](Everything& e) { e.args.q_scale.shape[0] = 1; })},
    {"k_scale", with([](Everything& e) { e.args.k_scale = {}; })},
    {"k_scale", with([](Everything& e) { e.args.k_scale.shape[0] = 1; })},
    {"v_scale", with([](Everything& e) { e.args.v_scale = {}; })},
    {"v_scale", with([](Everything& e) { e.args.v_scale.shape[0] = 1; })},
    {"v_scale", with([](Everything& e) { e.v_scales[3] = 5; })},
    {"out_scale", with([](Everything& e) { e.args.out_scale = {}; })},
    {"out_scale", with([](Everything& e) { e.out_scale[0] = 3; })},
    {"sinks", with([](Everything& e) { e.args.sinks = {}; })},
    {"sinks", with([](Everything& e) { e.sinks[3] = 0; })},
    {"slopes", with([](Everything& e) { e.args.slopes = {}; })},
    {"slopes", with([](Everything& e) { e.slopes[0] = 0; })},
    {"slopes", with([](Everything& e) {  // of each sequence
       e.args.slopes = Tensor(e.keys.data(), {2, e.kHeads});
     })},
    {"slopes", with([](Everything& e) { e.args.slopes.dtype = bf16; })},
    {"qq_bias", with([](Everything& e) { e.args.qq_bias = {}; })},
    {"qq_bias", with([](Everything& e) { e.bias[3] = 0; })},
    {"qq_bias", with([](Everything& e) {
       e.args.qq_bias = Tensor(e.bias.data(), {2, 2});
     })},
    {"causal", with([](Everything& e) { e.args.causal = {}; })},
    {"causal", with([](Everything& e) { e.causal[1] = 1; })},
    {"documents", with([](Everything& e) { e.args.documents = {}; })},
    {"documents", with([](Everything& e) { e.documents[1] = 4; })},
    {"documents", with([](Everything& e) { e.args.documents.shape[1] = 2; })},
    {"documents", with([](Everything& e) { e.documents[5] = 4; })},
    {"bidirectional", with([](Everything& e) { e.args.bidirectional = {}; })},
    {"bidirectional", with([](Everything& e) { e.images[1] = 4; })},
    {"bidirectional", with([](Everything& e) { e.args.bidirectional.shape[1] = 1; })},
    {"bidirectional", with([](Everything& e) { e.images[7] = 9; })},
    {"prefix_len", with([](Everything& e) { e.args.prefix_len = {}; })},
    {"prefix_len", with([](Everything& e) { e.prefix[1] = 4; })},
    {"left_padding", with([](Everything& e) { e.args.left_padding = {}; })},
    {"left_padding", with([](Everything& e) { e.padding[1] = 0; })},
    {"query_len", with([](Everything& e) { e.args.query_len = {}; })},
    {"query_len", with([](Everything& e) { e.used[0] = 1; })},
    {"indices", with([](Everything& e) { e.named[40] = 6; })},
    {"indices", with([](Everything& e) {  // the same for all kv heads
       e.args.indices = Tensor(e.named.data(), {e.kTokens, 3});
     })},
    {"indices", with([](Everything& e) {
       e.args.indices = Tensor(e.named.data(), {e.kTokens, e.kHeads, 2}, {12, 2, 1});
     })},
    {"index_len", with([](Everything& e) { e.args.index_len = {}; })},
    {"index_len", with([](Everything& e) { e.named_len[3] = 1; })},
    {"skip_decode", with([](Everything& e) { e.args.skip_decode = true; })},
    {"dropout_seed", with([](Everything& e) { e.args.dropout_seed = {}; })},
    {"dropout_seed", with([](Everything& e) { e.args.dropout_seed.shape[0] = 1; })},
    {"dropout_seed", with([](Everything& e) { e.seed[1] = 3; })},
    {"dropout_sequences", with([](Everything& e) { e.args.dropout_sequences = {}; })},
    {"dropout_sequences", with([](Everything& e) { e.numbers[1] = 3; })},
};

TEST(Agreement, EveryFieldOfARunIsComparedOrMayDiffer) {
  const std::vector<std::string> fields = names_of("AttentionArgs");
  const std::set<std::string> own = own_names();
  for (const std::string& field : fields) {
    const auto [begin, end] = kRuns.equal_range(field);
    ASSERT_NE(begin, end) << "AttentionArgs::" << field
                          << " is new: compare it in RunDescription, or put it on the list of "
                          << "own_fields() with the reason; then add it to this test";
    for (auto entry = begin; entry != end; ++entry) {
      const Everything plain(entry->second.kind);
      Everything changed(entry->second.kind);
      entry->second.change(changed);
      if (own.count("AttentionArgs::" + field))
        EXPECT_EQ(changed.digest(), plain.digest()) << field;
      else
        EXPECT_NE(changed.digest(), plain.digest()) << field;
    }
  }
  for (const auto& [name, change] : kRuns)
    EXPECT_THAT(fields, testing::Contains(name)) << "the test has a field that is no more";
}

/// For every array except a rank's own, and rows that are not checked.
TEST(Agreement, EveryByteOfAnArrayIsCompared) {
  const std::set<std::string> own = own_names();
  std::set<std::string> looked_at;
  for (const Of kind : {Of::batch, Of::one_length, Of::sharded_queries}) {
    const std::uint64_t plain = Everything(kind).digest();
    for (const auto& [name, ignored] : Everything(kind).contents()) {
      looked_at.insert(name);
      for (std::size_t i = 0; i < ignored.size(); ++i) {
        Everything changed(kind);
        changed.contents()[name][i] ^= std::byte{0x10};
        EXPECT_NE(changed.digest(), plain) << name << ", byte " << i;
      }
    }
  }
  for (const Field& field : fields_of("AttentionArgs")) {
    const bool trusted = field.name == "new_k" || field.name == "new_v";
    if (field.type != "Tensor" || trusted || own.count("AttentionArgs::" + field.name)) continue;
    EXPECT_TRUE(looked_at.count(field.name)) << "the contents of " << field.name;
  }
}

/// Tables of RoPE may be a rank's own, but all ranks have them or none has.
TEST(Agreement, WhetherThereAreTablesOfRopeIsCompared) {
  Everything with_tables, without;
  without.args.rope_cos = without.args.rope_sin = {};
  EXPECT_NE(with_tables.digest(), without.digest());
  EXPECT_NE(with_tables.text(), without.text());
}

/// The same bits mean other numbers.
TEST(Agreement, TypesOfFloatsAreCompared) {
  for (Tensor AttentionArgs::*array :
       {&AttentionArgs::sinks, &AttentionArgs::slopes, &AttentionArgs::qq_bias}) {
    Everything one, other;
    (one.args.*array).dtype = fp16;
    (other.args.*array).dtype = bf16;
    EXPECT_NE(one.digest(), other.digest());
    EXPECT_NE(one.text(), other.text());
  }
}

/// Also where the arrays are not read, as on GPUs without check_arrays.
TEST(Agreement, SlopesOfEachSequenceDifferFromSlopesOfAllByTheirShape) {
  Everything all, each;
  std::vector<float> slopes{5, 6, 7, 8, 5, 6, 7, 8};
  each.args.slopes = Tensor(slopes.data(), {2, Everything::kHeads});
  const RunDescription of_all(all.args, all.options, false),
      of_each(each.args, each.options, false);
  EXPECT_NE(of_all.hash(), of_each.hash());
  EXPECT_NE(of_all.text(nullptr, 0), of_each.text(nullptr, 0));
}

/// Every scale of [batch, kv_heads] is compared, and no room between sequences. Where one number
/// stands for all kv heads, nothing past it is read.
TEST(Agreement, ScalesOfEachSequenceAreCompared) {
  const auto digest = [](std::vector<float> scales, std::int64_t step, std::int64_t head) {
    Everything one;
    one.args.k_scale = Tensor(scales.data(), {2, Everything::kHeads}, {step, head});
    return one.digest();
  };
  const std::vector<float> scales{1, 2, 3, 4, 9, 5, 6, 7, 8};
  const std::uint64_t plain = digest(scales, 5, 1);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    std::vector<float> changed = scales;
    changed[i] += 1;
    EXPECT_EQ(digest(changed, 5, 1) == plain, i == 4) << i;
  }
  EXPECT_EQ(digest({1, 3, 9}, 1, 0), digest({1, 3, 8}, 1, 0));
  EXPECT_NE(digest({1, 3}, 1, 0), digest({1, 4}, 1, 0));
  EXPECT_NE(digest({1}, 0, 0), digest({2}, 0, 0));
}

TEST(Agreement, TheListOfOwnFieldsNamesFieldsThatThereAre) {
  std::ifstream page(std::string(LONGSPAN_SOURCE_DIR) + "/docs/contributing/ranks.md");
  std::stringstream text;
  text << page.rdbuf();
  for (const OwnField& field : own_fields()) {
    const std::string name = field.name;
    const std::size_t colons = name.find("::");
    ASSERT_NE(colons, std::string::npos) << name;
    const std::string structure = name.substr(0, colons);
    EXPECT_THAT(structure == "Options" ? option_fields() : names_of(structure),
                testing::Contains(name.substr(colons + 2)))
        << name;
    EXPECT_FALSE(std::string(field.why).empty());
    EXPECT_THAT(text.str(), testing::HasSubstr("`" + name + "`"));
  }
}

// ---- merges across ranks -----------------------------------------------------------------------

/// How two values compare: as a rank's own field, or as a compared one.
template <class T>
void expect_compared(const std::string& field, const T& changed, const T& plain) {
  if (own_names().count(field))
    EXPECT_EQ(changed, plain) << field;
  else
    EXPECT_NE(changed, plain) << field;
}

const std::map<std::string, std::function<void(MergeOptions&)>> kMergeOptions{
    {"heads", [](MergeOptions& o) { o.heads = 8; }},
    {"value_dim", [](MergeOptions& o) { o.value_dim = 65; }},
    {"dtype", [](MergeOptions& o) { o.dtype = fp16, o.out_dtype = bf16; }},
    {"out_dtype", [](MergeOptions& o) { o.out_dtype = fp32; }},
    {"max_tokens", [](MergeOptions& o) { o.max_tokens = 9; }},
    {"scatter_heads", [](MergeOptions& o) { o.scatter_heads = true; }},
    {"nan_is_empty", [](MergeOptions& o) { o.nan_is_empty = true; }},
    {"threads", [](MergeOptions& o) { o.threads = 3; }},
};

TEST(Agreement, EveryOptionOfAMergeIsComparedOrMayDiffer) {
  const std::vector<std::string> fields = names_of("MergeOptions");
  const NamedValues plain = describe(MergeOptions{}, LogBase::e);
  for (const std::string& field : fields) {
    const auto found = kMergeOptions.find(field);
    ASSERT_NE(found, kMergeOptions.end())
        << "MergeOptions::" << field << " is new: compare it in describe(), or put it on the list "
        << "of own_fields() with the reason; then add it to this test";
    MergeOptions changed;
    found->second(changed);
    expect_compared("MergeOptions::" + field, describe(changed, LogBase::e), plain);
  }
  EXPECT_EQ(fields.size(), kMergeOptions.size());
  EXPECT_NE(describe(MergeOptions{}, LogBase::two), plain);
}

/// A run of a merge with all arguments.
struct MergeRun {
  static constexpr int kTokens = 4, kHeads = 2, kDim = 16;
  std::vector<float> part = std::vector<float>(kTokens * kHeads * kDim), out = part;
  std::vector<float> lses = std::vector<float>(kTokens * kHeads), part_scale{1}, out_scale{2};
  MergeOptions options{.heads = kHeads, .value_dim = kDim, .dtype = e4m3, .max_tokens = kTokens};
  MergeArgs args{.part = Tensor(part.data(), e4m3, {kTokens, kHeads, kDim}),
                 .part_lse = Lse::tokens_heads(Tensor(lses.data(), {kTokens, kHeads})),
                 .part_scale = Tensor(part_scale.data(), {1}),
                 .out = Tensor(out.data(), e4m3, {kTokens, kHeads, kDim}),
                 .lse = Lse::tokens_heads(Tensor(lses.data(), {kTokens, kHeads})),
                 .out_scale = Tensor(out_scale.data(), {1})};

  MergeRun() = default;
  MergeRun(const MergeRun&) = delete;

  std::uint64_t digest() const { return run_digest_of({args, options, true}); }
};

const std::multimap<std::string, std::function<void(MergeRun&)>> kMergeRuns{
    {"part", [](MergeRun& m) { m.args.part.stride[0] += 16; }},
    {"part", [](MergeRun& m) { m.part[0] = 7; }},
    {"part_lse", [](MergeRun& m) { m.args.part_lse.tensor.stride[0] += 16; }},
    {"part_scale", [](MergeRun& m) { m.part_scale[0] = 3; }},
    {"out", [](MergeRun& m) { m.args.out.stride[0] += 16; }},
    {"lse", [](MergeRun& m) { m.args.lse = {}; }},
    {"out_scale", [](MergeRun& m) { m.args.out_scale = {}; }},
    {"out_scale", [](MergeRun& m) { m.out_scale[0] = 3; }},
};

TEST(Agreement, EveryFieldOfAMergeIsComparedOrMayDiffer) {
  const std::vector<std::string> fields = names_of("MergeArgs");
  const MergeRun plain;
  for (const std::string& field : fields) {
    const auto [begin, end] = kMergeRuns.equal_range(field);
    ASSERT_NE(begin, end) << "MergeArgs::" << field
                          << " is new: compare it in RunDescription, or put it on the list of "
                          << "own_fields() with the reason; then add it to this test";
    for (auto entry = begin; entry != end; ++entry) {
      MergeRun changed;
      entry->second(changed);
      expect_compared("MergeArgs::" + field, changed.digest(), plain.digest());
    }
  }
  for (const auto& [name, change] : kMergeRuns)
    EXPECT_THAT(fields, testing::Contains(name)) << "the test has a field that is no more";
}

TEST(Agreement, TheRowsOfAMergeAreCompared) {
  MergeRun plain, shorter;
  shorter.args.part.shape[0] = shorter.args.part_lse.tensor.shape[0] = 3;
  EXPECT_NE(shorter.digest(), plain.digest());
}

/// Every rank scales its own heads; whether there is a scale is compared nevertheless.
TEST(Agreement, TheScaleOfScatteredHeadsIsARanksOwn) {
  MergeRun plain, scaled, unscaled;
  for (MergeRun* run : {&plain, &scaled, &unscaled}) run->options.scatter_heads = true;
  scaled.out_scale[0] = 3;
  unscaled.args.out_scale = {};
  EXPECT_EQ(scaled.digest(), plain.digest());
  EXPECT_NE(unscaled.digest(), plain.digest());
}

// ---- what is compared in part ------------------------------------------------------------------

const std::map<std::string, std::function<void(ReshardOptions&)>> kReshardOptions{
    {"kv_heads", [](ReshardOptions& o) { o.kv_heads = 8; }},
    {"head_dim", [](ReshardOptions& o) { o.head_dim = 128, o.value_dim = 64; }},
    {"value_dim", [](ReshardOptions& o) { o.value_dim = 0; }},
    {"dtype", [](ReshardOptions& o) { o.dtype = fp16; }},
    {"lengths", [](ReshardOptions& o) { o.lengths.back() = 9; }},
    {"from.rule.layout", [](ReshardOptions& o) { o.from.rule.layout = Layout::zigzag; }},
    {"from.rule.block", [](ReshardOptions& o) { o.from.rule.block = 64; }},
    {"from.first_rank", [](ReshardOptions& o) { o.from.first_rank = 1; }},
    {"from.ranks", [](ReshardOptions& o) { o.from.ranks = 3; }},
    {"from.table",
     [](ReshardOptions& o) {
       o.from.table = {0, 5};
     }},
    {"to.rule.layout", [](ReshardOptions& o) { o.to.rule.layout = Layout::zigzag; }},
    {"to.rule.block", [](ReshardOptions& o) { o.to.rule.block = 64; }},
    {"to.first_rank", [](ReshardOptions& o) { o.to.first_rank = 1; }},
    {"to.ranks", [](ReshardOptions& o) { o.to.ranks = 3; }},
    {"to.table",
     [](ReshardOptions& o) {
       o.to.table = {0, 5};
     }},
    {"threads", [](ReshardOptions& o) { o.threads = 3; }},
};

TEST(Agreement, EveryOptionOfAReshardIsComparedOrMayDiffer) {
  const std::vector<std::string> fields = option_fields("ReshardOptions");
  ReshardOptions plain{.lengths = {1, 2, 3, 4, 5, 6, 7, 8}};
  plain.from.rule.layout = plain.to.rule.layout = Layout::interleaved;
  for (const std::string& field : fields) {
    const auto found = kReshardOptions.find(field);
    ASSERT_NE(found, kReshardOptions.end())
        << "ReshardOptions::" << field << " is new: compare it in describe(), or put it on the "
        << "list of own_fields() with the reason; then add it to this test";
    ReshardOptions changed = plain;
    found->second(changed);
    expect_compared("ReshardOptions::" + field, describe(changed), describe(plain));
  }
  EXPECT_EQ(fields.size(), kReshardOptions.size());
}

TEST(Agreement, ThePartsOfCachesThatAreReshardedAreARanksOwn) {
  for (const std::string& field : names_of("ReshardArgs"))
    EXPECT_EQ(own_names().count("ReshardArgs::" + field), 1U) << field;
}

TEST(Agreement, EveryRankSaysTheSame) {
  for (const Of kind : {Of::batch, Of::one_sequence, Of::one_length, Of::sharded_queries}) {
    Everything one(kind), other(kind);
    other.rank = 1;
    EXPECT_EQ(one.digest(), other.digest());
    EXPECT_EQ(one.text(), other.text());
  }
}

TEST(Agreement, ALengthStandsInOnePlace) {
  Everything one(Of::one_length), other(Of::one_length);
  other.args.total_keys = 30;
  EXPECT_NE(one.digest(), other.digest());
  Everything both(Of::one_sequence);
  both.args.total_keys = 20;
  EXPECT_THROW(both.digest(), InputError) << "kv_len says how long sequences are";
}

TEST(Agreement, WhetherThereIsABlockTableIsCompared) {
  Everything paged, contiguous;
  contiguous.args.block_table = {};
  EXPECT_NE(paged.digest(), contiguous.digest());
}

TEST(Agreement, RowsOfQueriesAreARanksOwnWhereQueriesAreSharded) {
  for (const bool sharded : {false, true}) {
    const Of kind = sharded ? Of::sharded_queries : Of::one_sequence;
    Everything one(kind), other(kind);
    for (Everything* e : {&one, &other}) {  // they fit the rows
      e->options.indices = {};
      e->args.indices = e->args.index_len = {};
    }
    other.args.q.shape[0] = 3;
    EXPECT_EQ(one.digest() == other.digest(), sharded);
  }
}

/// Their number, their places, and whether there is one at all.
TEST(Agreement, AListedTableIsARanksOwn) {
  Everything one(Of::sharded_queries), other(Of::sharded_queries), none(Of::sharded_queries);
  std::vector<std::int64_t> first{0, 2, 4, -1}, second{1, 3, -1, -1};
  for (Everything* e : {&one, &other, &none}) {
    e->options.keys.layout = e->options.queries->layout = Layout::listed;
    e->args.key_table = Tensor(first.data(), {3});
    e->args.query_table = Tensor(first.data(), {4});
  }
  other.args.key_table = Tensor(second.data(), {2});
  other.args.query_table = Tensor(second.data(), {4});
  std::vector<std::int64_t> no_rows(4, -1);  // keys need no table then; that of queries travels
  none.args.key_table = {};
  none.args.query_table = Tensor(no_rows.data(), {4});
  none.args.q.shape[0] = 0;
  EXPECT_EQ(one.digest(), other.digest());
  EXPECT_EQ(one.digest(), none.digest());
}

TEST(Agreement, WhereAMatrixLiesIsARanksOwn) {
  Everything one, other;
  std::vector<float> wide(4 * 7, -1.0f);
  for (int row = 0; row < 4; ++row)
    std::copy_n(one.bias.begin() + 4 * row, 4, wide.begin() + 7 * row);
  other.args.qq_bias.data = wide.data();
  other.args.qq_bias.stride[0] = 7;
  EXPECT_EQ(one.digest(), other.digest());
}

TEST(Agreement, TextsNameTheFieldAndItsValues) {
  Everything e;
  e.lens = {1000, 2000};
  EXPECT_THAT(e.text(), testing::IsSupersetOf({Named{"batch", "2"},
                                               {"rows of q", "4"},
                                               {"key_table", "[0, 10, 20, 0, 10, 30]"},
                                               {"kv_len", "[1000, 2000]"},
                                               {"sinks", "[1, 2, 3, 4]"},
                                               {"causal", "[1, 0]"},
                                               {"block_table", "given"}}));
  e.args.sinks = {};
  EXPECT_THAT(e.text(), testing::Contains(Named{"sinks", "not given"}));
  EXPECT_THAT(Everything(Of::one_length).text(), testing::Contains(Named{"total_keys", "20"}));
  EXPECT_THAT(Everything(Of::sharded_queries).text(),
              testing::IsSupersetOf({Named{"total_tokens", "4"}, {"query_table", "[0, 2, 4]"}}));
  e.options.keys = {Layout::interleaved, 64};
  EXPECT_THAT(describe(e.options),
              testing::IsSupersetOf({Named{"keys", "interleaved:64"}, {"queries", "not sharded"}}));
}

/// Another rank may ask before the digests of a run exist: they then match anything, and are not a
/// difference.
TEST(Agreement, DigestsThatAreNotThereYetDifferFromNone) {
  const auto packed = [](const NamedValues& named) {
    std::vector<std::string> all;
    for (const auto& [name, value] : named) all.insert(all.end(), {name, value});
    return all;
  };
  const auto differ = [](const std::vector<std::string>& one,
                         const std::vector<std::string>& other) {
    return comm::difference(one, "0", other, "1", "here");
  };
  Everything e;
  const RunDescription run = e.described();
  std::vector<std::uint64_t> words(RunHistory::kWordsOfRun, 0);
  const kernels::DigestParams arrays = run.arrays(words.data(), 7);
  const NamedValues early = run.text(words.data(), 7);
  EXPECT_THAT(early, testing::Contains(Named{"qq_bias", comm::kNotKnown}));
  EXPECT_THAT(early, testing::Contains(Named{"kv_len", "[20, 30]"})) << "what the host has read";
  kernels::host_backend(1)->digest(arrays, {});
  const NamedValues late = run.text(words.data(), 7);
  EXPECT_THAT(late, testing::Not(testing::Contains(Named{"qq_bias", comm::kNotKnown})));
  EXPECT_THAT(run.text(words.data(), 8), testing::Contains(Named{"qq_bias", comm::kNotKnown}))
      << "those of another run";
  EXPECT_EQ(differ(packed(early), packed(late)), std::nullopt);
  EXPECT_EQ(differ(packed(late), packed(early)), std::nullopt);

  e.bias.back() += 1;
  const RunDescription other = e.described();
  std::vector<std::uint64_t> others(RunHistory::kWordsOfRun, 0);
  kernels::host_backend(1)->digest(other.arrays(others.data(), 7), {});
  const auto found = differ(packed(late), packed(other.text(others.data(), 7)));
  ASSERT_TRUE(found);
  EXPECT_THAT(*found, testing::HasSubstr("'qq_bias' differs"));
  EXPECT_EQ(differ(packed(early), packed(other.text(others.data(), 7))), std::nullopt);
  EXPECT_TRUE(differ({"one", comm::kNotKnown}, {"one", comm::kNotKnown, "two", "2"}));
  EXPECT_TRUE(differ({"one", comm::kNotKnown, "two", "1"}, {"one", "1", "two", "2"}));
}

TEST(Agreement, LayersOfOtherOptionsOrNumbersHaveOtherHashes) {
  const auto hash_of = [](const NamedValues& options, std::uint32_t layer) {
    RunHistory history(options);
    history.set_layer(layer);
    return history.hash();
  };
  const std::uint64_t hash = hash_of({{"heads", "12"}, {"keys", "zigzag"}}, 1);
  EXPECT_EQ(hash, hash_of({{"heads", "12"}, {"keys", "zigzag"}}, 1));
  EXPECT_NE(hash, hash_of({{"heads", "12"}, {"keys", "zigzag"}}, 2));
  EXPECT_NE(hash, hash_of({{"heads", "1"}, {"keys", "2zigzag"}}, 1));
  EXPECT_NE(hash, hash_of({{"heads", "21"}, {"keys", "zigzag"}}, 1));
}

TEST(Agreement, RunsHaveAPlaceInTheOrderOfTheirCommunicator) {
  comm::RunOrder mine, theirs;
  mine.add({1, 0});
  theirs.add({1, 0});
  mine.add({2, 1});
  theirs.add({1, 1});
  EXPECT_EQ(mine.last(), (comm::RunName{2, 1}));
  const comm::AskedRun asked = mine.find({2, 1});
  EXPECT_EQ(asked.place, 2U);
  EXPECT_EQ(theirs.at(asked), (comm::RunName{1, 1})) << "what this rank ran there";
  for (int i = 0; i < 2000; ++i) mine.add({1, 5});
  EXPECT_EQ(mine.find({2, 1}).place, 0U) << "too long ago";
  EXPECT_EQ(mine.at({0, {2, 1}}), (comm::RunName{2, 1})) << "asked for by its name";
  EXPECT_FALSE(mine.at(asked));
  EXPECT_FALSE(theirs.at({3, {}})) << "not yet";
}

TEST(Agreement, ALogKeepsTheLastRuns) {
  RunHistory history(NamedValues{{"heads", "4"}});
  history.set_layer(3);
  const Everything one(Of::one_sequence), two;
  for (std::uint32_t run = 1; run <= RunHistory::kRuns + 1; ++run)
    EXPECT_EQ(history.add((run % 2 == 0 ? one : two).described()), run);
  EXPECT_THAT(history.describe(0),
              testing::ElementsAre(Named{"heads", "4"}, Named{"layer", "number 3"}))
      << "what the layer was made with";
  EXPECT_TRUE(history.describe(1).empty()) << "as many runs ago as the log keeps";
  EXPECT_THAT(history.describe(2),
              testing::IsSupersetOf({Named{"heads", "4"}, Named{"layer", "number 3"},
                                     Named{"run of the layer", "number 2"}, Named{"batch", "1"}}));
  EXPECT_THAT(history.describe(3), testing::Contains(Named{"batch", "2"}));
  EXPECT_TRUE(history.describe(RunHistory::kRuns + 2).empty()) << "a run that is not there yet";
}

/// A backward differs from its run by one value, also where the layer has no gradients and refuses
/// it.
TEST(Agreement, ABackwardIsDescribedAsItsRun) {
  for (const bool gradients : {false, true}) {
    Options o;
    o.gradients = gradients;
    GradientArgs args;
    args.run.total_keys = 77;
    const auto value_of = [](const NamedValues& all, const std::string& name) {
      for (const auto& [key, value] : all)
        if (key == name) return value;
      return std::string("not named");
    };
    const NamedValues run = RunDescription(args.run, o).text(nullptr, 0);
    const NamedValues backward = RunDescription(args, o).text(nullptr, 0);
    EXPECT_EQ(value_of(run, "backward"), gradients ? "false" : "not named");
    EXPECT_EQ(value_of(backward, "backward"), "true");
    for (std::size_t i = 0; i < run.size(); ++i)
      if (run[i].first != "backward") {
        EXPECT_EQ(backward.at(i), run[i]);
      }
  }
}

}  // namespace
}  // namespace longspan
