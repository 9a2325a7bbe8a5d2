// Common to the sections of bench_serving: the options, and the line of a case.
#pragma once

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/data.hpp"
#include "bench/timing.hpp"
#include "longspan/longspan.hpp"

namespace longspan::bench {

using Json = nlohmann::ordered_json;

inline constexpr double kBeyondCache = 240e6;  // bytes: four times an H200's L2

struct Settings {
  Device device = Device::cuda;
  bool tiny = false;
  int threads = 0;
  std::vector<std::string> sections;
  std::vector<std::size_t> rows;  // of the tables; none: all
  std::vector<PageLayout> layouts;
  std::vector<int> pages = {16};
  std::string kv_dtype = "bf16";
  int tokens = 1;  // new tokens of a sequence in decode
  std::int64_t window = 0;
  bool identity = false;

  bool takes(std::size_t row) const {
    return rows.empty() || std::find(rows.begin(), rows.end(), row) != rows.end();
  }
  DType cache_type() const { return kv_dtype == "e4m3" ? e4m3 : kv_dtype == "e5m2" ? e5m2 : bf16; }
};

/// A case of decode.
struct DecodeRow {
  int heads, kv_heads, batch;
  std::int64_t kv_len;
};

/// `launches` calls in a graph, replayed as often as the settings allow.
Effort effort(const Settings& s, int launches);

/// A line for a case, with its judge's result.
void print(Json line, const Times& t, const Judge* judge, DType dtype);

/// One case; an exception becomes one line, with the case, and costs only that case.
void attempt(const Json& about, const std::function<void()>& one);

/// In units of 1e12 a second.
inline double rate(double amount, const Times& t) { return amount / t.median / 1e6; }

// ---- the sections -------------------------------------------------------------------------------

void copy(const Settings& s);
void merge(const Settings& s, const ServingOps& ops);
void decode(const Settings& s, const ServingOps& ops);
void chunked(const Settings& s, const ServingOps& ops);
void layer(const Settings& s);
void beside_plain(const Settings& s, const ServingOps& ops);

}  // namespace longspan::bench
