// Every field of Options and Request is compared between ranks, or stands on the list of those that
// may differ. The fields are read from the headers themselves, so that a new one that is neither
// fails here.
#include "src/agreement.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "src/validate.hpp"

namespace longspan {
namespace {

/// The names of the members of `structure` in a public header.
std::vector<std::string> fields_of(const std::string& structure, const std::string& header) {
  std::ifstream file(std::string(LONGSPAN_SOURCE_DIR) + "/src/longspan/" + header);
  EXPECT_TRUE(file) << header;
  std::stringstream all;
  all << file.rdbuf();
  std::string text = all.str();
  const auto begin = text.find("struct " + structure + " {");
  EXPECT_NE(begin, std::string::npos) << structure;
  text = text.substr(begin, text.find("\n};", begin) - begin);
  text = text.substr(text.find('{') + 1);
  text = std::regex_replace(text, std::regex("//[^\n]*"), "");
  text = std::regex_replace(text, std::regex("<[^<>;]*>"), "");  // template arguments
  // Bodies of functions and initialisers, the innermost first.
  for (std::string before; before != text;) {
    before = text;
    text = std::regex_replace(text, std::regex("\\{[^{}]*\\}"), "~");
  }
  text = std::regex_replace(text, std::regex("\\)[^;~]*~"), ");");  // function definitions
  std::vector<std::string> names;
  std::stringstream statements(text);
  for (std::string statement; std::getline(statements, statement, ';');) {
    if (statement.find('(') != std::string::npos) continue;  // a function
    if (statement.find("constexpr") != std::string::npos) continue;
    std::stringstream declarators(statement);
    for (std::string declarator; std::getline(declarators, declarator, ',');) {
      declarator = declarator.substr(0, declarator.find('='));
      std::smatch name;
      if (std::regex_search(declarator, name, std::regex("([A-Za-z_][A-Za-z_0-9]*)\\s*~?\\s*$")))
        names.push_back(name[1]);
    }
  }
  return names;
}

std::set<std::string> own_names() {
  std::set<std::string> names;
  for (const OwnField& field : own_fields()) names.insert(field.name);
  return names;
}

TEST(Agreement, TheReaderOfHeadersFindsWhatIsThere) {
  EXPECT_THAT(fields_of("Mask", "mask.hpp"), testing::ElementsAre("causal", "window", "right"));
  EXPECT_THAT(fields_of("Scales", "element.hpp"), testing::ElementsAre("data", "per_head"));
  EXPECT_THAT(fields_of("Request", "attention.hpp"),
              testing::IsSupersetOf({"q", "new_v", "v_scale", "query_shard", "skip_decode"}));
}

// ---- options -----------------------------------------------------------------------------------

using ChangeOptions = std::function<void(Options&)>;
const std::map<std::string, ChangeOptions> kOptions{
    {"heads", [](Options& o) { o.heads = 8; }},
    {"kv_heads", [](Options& o) { o.kv_heads = 2; }},
    {"head_dim", [](Options& o) { o.head_dim = 128; }},
    {"value_dim", [](Options& o) { o.value_dim = 24; }},
    {"dtype", [](Options& o) { o.dtype = fp16; }},
    {"query_dtype", [](Options& o) { o.query_dtype = e4m3; }},
    {"kv_dtype", [](Options& o) { o.kv_dtype = e4m3; }},
    {"out_dtype", [](Options& o) { o.out_dtype = e4m3; }},
    {"tf32", [](Options& o) { o.tf32 = true; }},
    {"fp8_products", [](Options& o) { o.fp8_products = true; }},
    {"mask.causal", [](Options& o) { o.mask.causal = true; }},
    {"mask.window", [](Options& o) { o.mask.window = 7; }},
    {"mask.right", [](Options& o) { o.mask.right = 7; }},
    {"scale", [](Options& o) { o.scale = 0.5f; }},
    {"softcap", [](Options& o) { o.softcap = 30; }},
    {"alibi", [](Options& o) { o.alibi = Alibi::query; }},
    {"max_tokens", [](Options& o) { o.max_tokens = 5; }},
    {"max_batch", [](Options& o) { o.max_batch = 5; }},
    {"max_kv_len", [](Options& o) { o.max_kv_len = 5; }},
    {"max_query_len", [](Options& o) { o.max_query_len = 5; }},
    {"shard_queries", [](Options& o) { o.shard_queries = true; }},
    {"invariant", [](Options& o) { o.invariant = true; }},
    {"strategy", [](Options& o) { o.strategy = "gather-states"; }},
    {"exchange", [](Options& o) { o.exchange = Exchange::gather; }},
    {"threads", [](Options& o) { o.threads = 3; }},
    {"check_arrays", [](Options& o) { o.check_arrays = true; }},
    {"profile", [](Options& o) { o.profile = true; }},
};

TEST(Agreement, EveryOptionIsComparedOrMayDiffer) {
  std::vector<std::string> fields = fields_of("Options", "attention.hpp");
  std::erase(fields, "mask");
  for (const std::string& field : fields_of("Mask", "mask.hpp")) fields.push_back("mask." + field);
  const std::set<std::string> own = own_names();
  for (const std::string& field : fields) {
    const auto change = kOptions.find(field);
    ASSERT_NE(change, kOptions.end())
        << "Options::" << field << " is new: compare it in describe(), or put it on the list of "
        << "own_fields() with the reason; then add it to this test";
    Options changed;
    change->second(changed);
    if (own.count("Options::" + field))
      EXPECT_EQ(describe(changed), describe(Options{})) << field;
    else
      EXPECT_NE(describe(changed), describe(Options{})) << field;
  }
  EXPECT_EQ(fields.size(), kOptions.size());
}

// ---- requests ----------------------------------------------------------------------------------

/// A request that gives everything, whose arrays live here.
struct Everything {
  std::vector<float> q = std::vector<float>(4 * 4 * 16), out = q, keys = q;
  std::vector<std::int32_t> start{0, 2, 4}, lens{20, 30}, table{0, 1};
  std::vector<std::uint8_t> causal{1, 0};
  std::vector<float> scales{1, 2, 3, 4}, sinks{1, 2, 3, 4}, slopes{5, 6, 7, 8}, bias{1, 2, 3, 4};
  std::vector<std::int64_t> documents{0, 3, 9}, ranges{0, 10, 20, 0, 10, 30}, rows{0, 2, 4};
  float out_scale = 2;
  Options options{.heads = 4, .kv_heads = 4, .head_dim = 16, .dtype = fp32, .max_batch = 2};
  Request request;

  Everything() {
    Request& r = request;
    r.q = Tensor(q.data(), fp32, {4, 4, 16});
    r.k = r.v = r.new_k = r.new_v = Tensor(keys.data(), fp32, {4, 4, 16});
    r.out = Tensor(out.data(), fp32, {4, 4, 16});
    r.shard = Shard::ranges(20, 0, 2, ranges.data());
    r.query_shard = Shard::ranges(4, 0, 2, rows.data());
    r.batch = 2;
    r.query_start = start.data();
    r.kv_len = lens.data();
    r.block_table = {table.data(), 1};
    r.q_scale = r.k_scale = r.v_scale = {scales.data(), true};
    r.out_scale = &out_scale;
    r.sinks = sinks.data();
    r.slopes = slopes.data();
    r.qq_bias = {bias.data(), 2, 2};
    r.causal = causal.data();
    r.documents = {documents.data(), 2};
  }

  /// The hash that travels, contents of arrays included, as a layer on processors makes it.
  std::uint64_t said() const {
    const RunDescription run(request, options, true);
    std::vector<std::uint64_t> words(kernels::DigestParams::kMostArrays + 1);
    const kernels::DigestParams arrays = run.arrays(words.data());
    kernels::host_backend(1)->digest(arrays, {});
    return kernels::said(run.hash(), words.data() + arrays.count);
  }
  NamedValues text() const { return RunDescription(request, options, true).text(nullptr); }
};

struct ChangeRequest {
  std::function<void(Everything&)> change;
  bool sharded_queries = false;  // seen with shard_queries only
};
template <class Change>
ChangeRequest with(Change change, bool sharded_queries = false) {
  return {change, sharded_queries};
}

const std::multimap<std::string, ChangeRequest> kRequests{
    {"Request::q", with([](Everything& e) { e.request.q.stride[0] += 16; })},
    {"Request::k", with([](Everything& e) { e.request.k.shape[0] = 3; })},
    {"Request::v", with([](Everything& e) { e.request.v.shape[0] = 3; })},
    {"Shard::layout", with([](Everything& e) { e.request.shard.layout = Layout::contiguous; })},
    {"Shard::layout",
     with([](Everything& e) { e.request.query_shard.layout = Layout::zigzag; }, true)},
    {"Shard::rank", with([](Everything& e) { e.request.shard.rank = 1; })},
    {"Shard::ranks", with([](Everything&) {})},  // the communicator's
    {"Shard::length", with([](Everything& e) { e.request.query_shard.length = 5; }, true)},
    {"Shard::table", with([](Everything& e) { e.ranges[4] = 11; })},
    {"Shard::table", with([](Everything& e) { e.rows[1] = 1; }, true)},
    {"Shard::listed", with([](Everything& e) { e.request.shard.listed = 5; })},
    {"Request::out", with([](Everything& e) { e.request.out.stride[0] += 16; })},
    {"Request::lse", with([](Everything& e) {
       e.request.lse = Tensor(e.out.data(), fp32, {4, 4});
     })},
    {"Request::batch", with([](Everything& e) { e.request.batch = 1; })},
    {"Request::query_start", with([](Everything& e) { e.request.query_start = nullptr; })},
    {"Request::query_start", with([](Everything& e) { e.start[1] = 1; })},
    {"Request::kv_len", with([](Everything& e) { e.request.kv_len = nullptr; })},
    {"Request::kv_len", with([](Everything& e) { e.lens[1] = 29; })},
    {"BlockTable::data", with([](Everything& e) { e.table[0] = 1; })},
    {"BlockTable::columns", with([](Everything& e) { e.request.block_table.columns = 2; })},
    {"BlockTable::row_stride", with([](Everything& e) { e.request.block_table.row_stride = 2; })},
    {"BlockTable::column_stride",
     with([](Everything& e) { e.request.block_table.column_stride = 2; })},
    {"Request::block_table", with([](Everything& e) { e.request.block_table = {}; })},
    {"Request::new_k", with([](Everything& e) { e.request.new_k = {}; })},
    {"Request::new_v", with([](Everything& e) { e.request.new_v = {}; })},
    {"Request::q_scale", with([](Everything& e) { e.request.q_scale = {}; })},
    {"Request::k_scale", with([](Everything& e) { e.request.k_scale = {}; })},
    {"Request::v_scale", with([](Everything& e) { e.request.v_scale = {}; })},
    {"Scales::data", with([](Everything& e) { e.scales[3] = 5; })},
    {"Scales::per_head", with([](Everything& e) { e.request.v_scale.per_head = false; })},
    {"Request::out_scale", with([](Everything& e) { e.request.out_scale = nullptr; })},
    {"Request::out_scale", with([](Everything& e) { e.out_scale = 3; })},
    {"Request::sinks", with([](Everything& e) { e.request.sinks = {}; })},
    {"Request::sinks", with([](Everything& e) { e.sinks[3] = 0; })},
    {"Floats::data", with([](Everything& e) { e.slopes[0] = 0; })},
    {"Floats::dtype", with([](Everything& e) { e.request.slopes.dtype = bf16; })},
    {"Request::slopes", with([](Everything& e) { e.request.slopes = {}; })},
    {"Request::qq_bias", with([](Everything& e) { e.request.qq_bias = {}; })},
    {"QqBias::values", with([](Everything& e) { e.bias[3] = 0; })},
    {"QqBias::width", with([](Everything& e) { e.request.qq_bias.width = 1; })},
    {"QqBias::row_stride", with([](Everything&) {})},  // the same matrix laid out in another way
    {"Request::causal", with([](Everything& e) { e.request.causal = nullptr; })},
    {"Request::causal", with([](Everything& e) { e.causal[1] = 1; })},
    {"Request::documents", with([](Everything& e) { e.request.documents = {}; })},
    {"Documents::start", with([](Everything& e) { e.documents[1] = 4; })},
    {"Documents::count", with([](Everything& e) { e.request.documents.count = 1; })},
    {"Request::skip_decode", with([](Everything& e) { e.request.skip_decode = true; })},
    {"Request::query_shard",
     with([](Everything& e) { e.request.query_shard.layout = Layout::striped; }, true)},
    {"Request::shard", with([](Everything& e) { e.request.shard.layout = Layout::striped; })},
    {"Shard::block", with([](Everything& e) {
       e.request.shard.layout = Layout::interleaved;
       e.request.shard.block = 256;
     })},
};

TEST(Agreement, EveryFieldOfARequestIsComparedOrMayDiffer) {
  std::vector<std::string> fields;
  for (const auto& [structure, header] :
       {std::pair{"Request", "attention.hpp"}, std::pair{"Shard", "shard.hpp"},
        std::pair{"BlockTable", "kv_cache.hpp"}, std::pair{"Scales", "element.hpp"},
        std::pair{"Floats", "element.hpp"}, std::pair{"QqBias", "score.hpp"},
        std::pair{"Documents", "mask.hpp"}})
    for (const std::string& field : fields_of(structure, header))
      fields.push_back(std::string(structure) + "::" + field);
  const std::set<std::string> own = own_names();
  for (const std::string& field : fields) {
    const auto [begin, end] = kRequests.equal_range(field);
    ASSERT_NE(begin, end)
        << field << " is new: compare it in RunDescription, or put it on the list of own_fields() "
        << "with the reason; then add it to this test";
    for (auto entry = begin; entry != end; ++entry) {
      Everything plain, changed;
      plain.options.shard_queries = changed.options.shard_queries = entry->second.sharded_queries;
      entry->second.change(changed);
      if (own.count(field))
        EXPECT_EQ(changed.said(), plain.said()) << field;
      else
        EXPECT_NE(changed.said(), plain.said()) << field;
    }
  }
  for (const auto& [name, change] : kRequests)
    EXPECT_THAT(fields, testing::Contains(name)) << "the test has a field that is no more";
}

TEST(Agreement, TheListOfOwnFieldsNamesFieldsThatThereAre) {
  std::ifstream page(std::string(LONGSPAN_SOURCE_DIR) + "/docs/architecture.md");
  std::stringstream text;
  text << page.rdbuf();
  for (const OwnField& field : own_fields()) {
    const std::string name = field.name;
    const bool option = name.starts_with("Options::");
    EXPECT_TRUE(option ? kOptions.count(name.substr(9)) : kRequests.count(name)) << name;
    EXPECT_FALSE(std::string(field.why).empty());
    const std::string documented =
        name.starts_with("BlockTable::") ? "BlockTable" : name;  // the page has it as a whole
    EXPECT_THAT(text.str(), testing::HasSubstr("`" + documented + "`"));
  }
}

TEST(Agreement, ALengthIsComparedWhereItIsUsed) {
  Everything one, other;
  one.request.shard = other.request.shard = Shard::contiguous(20, 0, 2);
  other.request.shard.length = 30;
  EXPECT_EQ(one.said(), other.said()) << "kv_len says how long sequences are";
  one.request.kv_len = other.request.kv_len = nullptr;
  EXPECT_NE(one.said(), other.said());
}

TEST(Agreement, TextsNameTheFieldAndItsValues) {
  Everything e;
  e.lens = {1000, 2000};
  EXPECT_THAT(e.text(), testing::IsSupersetOf({std::pair<std::string, std::string>{"batch", "2"},
                                               {"shard.layout", "ranges"},
                                               {"kv_len", "[1000, 2000]"},
                                               {"sinks", "[1, 2, 3, 4]"},
                                               {"causal", "[1, 0]"}}));
  e.request.sinks = {};
  EXPECT_THAT(e.text(),
              testing::Contains(std::pair<std::string, std::string>{"sinks", "not given"}));
}

TEST(Agreement, ALogKeepsTheLastRuns) {
  RunHistory history(nullptr);
  Everything e;
  for (std::uint32_t run = 1; run <= RunHistory::kRuns + 1; ++run) {
    e.request.batch = static_cast<int>(1 + run % 2);
    EXPECT_EQ(history.add(RunDescription(e.request, e.options, true)), run);
  }
  EXPECT_TRUE(history.describe(0).empty());
  EXPECT_TRUE(history.describe(1).empty()) << "as many runs ago as the log keeps";
  EXPECT_THAT(history.describe(2),
              testing::Contains(std::pair<std::string, std::string>{"batch", "1"}));
  EXPECT_THAT(history.describe(3),
              testing::Contains(std::pair<std::string, std::string>{"batch", "2"}));
  EXPECT_TRUE(history.describe(RunHistory::kRuns + 2).empty()) << "a run that is not there yet";
}

}  // namespace
}  // namespace longspan
