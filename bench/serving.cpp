// Times the serving kernels (serving.hpp) on one device and prints a line of JSON for each case:
//
//     bench_serving                          on the GPU: copy, merge, decode, chunked
//     bench_serving --device host            the same on CPUs: slow without --tiny
//     bench_serving --section layer          decode of the layer on contiguous keys, on the GPU
//     bench_serving --device host --section plain
//                                            paged attention beside the layer on contiguous keys
//
// Bytes count once each (merge: read and written; decode: keys and values only). Operations of
// chunked prefill are 4 heads dim (new context + new^2 / 2) a sequence. A sample of every result is
// compared with float64 ("right"). Where one is wrong or a case throws ("error") the status is 5.
#include "bench/serving.hpp"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

namespace longspan::bench {
namespace {

constexpr int kWrongResult = 5;

bool all_right = true;  // so far

}  // namespace

Effort effort(const Settings& s, int launches) {
  const bool host = s.device == Device::host;
  return {launches, s.tiny ? 3 : host ? 7 : 30, s.tiny ? 0.0 : 3e5};
}

void print(Json line, const Times& t, const Judge* judge, DType dtype) {
  line["us"] = t.median;
  line["min_us"] = t.least;
  line["spread"] = t.spread;
  line["count"] = t.count;
  if (judge != nullptr) {
    line["right"] = judge->right(dtype);
    line["relative_error"] = judge->relative();
    all_right = all_right && judge->right(dtype);
  }
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

void attempt(const Json& about, const std::function<void()>& one) {
  try {
    one();
  } catch (const std::exception& error) {
    Json line = about;
    line["error"] = error.what();
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
    all_right = false;
  }
}

namespace {

int run(int argc, char** argv) {
  Settings s;
  std::string device = "cuda";
  std::vector<std::string> layouts = {"rows"};
  CLI::App app("Times the serving kernels; a line of JSON for each case.");
  app.add_option("--device", device, "cuda or host")->check(CLI::IsMember({"cuda", "host"}));
  app.add_option("--section", s.sections, "copy, merge, decode, chunked [all]; layer; plain")
      ->check(CLI::IsMember({"copy", "merge", "decode", "chunked", "layer", "plain"}));
  app.add_option("--row", s.rows, "Only these rows of the tables, from 0");
  app.add_option("--layout", layouts, "Of pages: rows, x-packed")
      ->check(CLI::IsMember({"rows", "x-packed"}));
  app.add_option("--page", s.pages, "Keys in a page")->check(CLI::Range(1, 65536));
  app.add_option("--kv-dtype", s.kv_dtype, "Of the cache: bf16, e4m3, e5m2")
      ->check(CLI::IsMember({"bf16", "e4m3", "e5m2"}));
  app.add_option("--tokens", s.tokens, "New tokens of a sequence in decode")
      ->check(CLI::Range(1, 4096));
  app.add_option("--window", s.window, "Sliding window in decode; 0: none")
      ->check(CLI::Range(0, 1 << 30));
  app.add_option("--threads", s.threads, "On the host; 0: all");
  app.add_flag("--identity", s.identity, "Pages in order instead of permuted");
  app.add_flag("--tiny", s.tiny, "Small sizes, for a try");
  CLI11_PARSE(app, argc, argv);
  s.device = device == "cuda" ? Device::cuda : Device::host;
  for (const std::string& layout : layouts)
    s.layouts.push_back(layout == "rows" ? PageLayout::rows : PageLayout::x_packed);
  if (s.sections.empty()) s.sections = {"copy", "merge", "decode", "chunked"};

  const ServingOps ops(s.device, s.threads);
  for (const std::string& section : s.sections) {
    if (section == "copy") copy(s);
    if (section == "merge") merge(s, ops);
    if (section == "decode") decode(s, ops);
    if (section == "chunked") chunked(s, ops);
    if (section == "layer") layer(s);
    if (section == "plain") beside_plain(s, ops);
  }
  return all_right ? 0 : kWrongResult;
}

}  // namespace
}  // namespace longspan::bench

int main(int argc, char** argv) {
  try {
    return longspan::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_serving: %s\n", error.what());
    return 1;
  }
}
