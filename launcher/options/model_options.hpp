// The options of the commands around the cost model: `longspan calibrate`, `plan` and `bench
// scale`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/mask.hpp"
#include "longspan/shard.hpp"

namespace CLI {
class App;
}

namespace longspan::launcher {

/// The shape of the attention that the commands below predict or measure.
struct ShapeOptions {
  int heads = 8;
  int kv_heads = 0;   // 0: heads
  int dim = 0;        // 0: 128 on GPUs, 64 on CPUs
  std::string dtype;  // empty: bf16 on GPUs, fp32 on CPUs
};

struct CalibrateOptions {
  ShapeOptions shape;
  std::string out;  // empty: machine_file of the device
};

struct PlanOptions {
  int nodes = 1;
  int ranks_per_node = 8;
  std::int64_t kv = 1 << 20;  // keys of the sequence
  std::int64_t tokens = 0;    // query rows; 0: as many as kv
  ShapeOptions shape;
  int value_dim = 0;  // 0: dim
  bool values_in_keys = false;
  Mask mask;
  int top_k = 0;  // keys that a row names; 0: the mask says what it sees
  std::string shard = "zigzag";
  Layout layout = Layout::zigzag;
  std::int64_t block = kSegment;
  std::int64_t max_workspace = 0;  // bytes; 0: no limit
  bool backward = false;
  std::string machine;  // a file of constants; empty: an H200
  std::string json;
};

struct ScaleOptions {
  std::vector<std::string> phases = {"prefill", "chunk", "decode"};
  std::vector<std::int64_t> kv;  // empty: by the phase and the device
  std::int64_t chunk = 512;      // query rows of a chunk
  bool weak = false;             // kv is for each rank
  int batch = 1;
  ShapeOptions shape;
  std::string shard = "zigzag";
  Layout layout = Layout::zigzag;
  std::int64_t block = kSegment;
  int ranks_per_node = 0;               // 0: those that share a machine
  std::vector<std::string> strategies;  // empty: every supported one
  std::vector<int> ranks;               // empty: 1, 2, 4 ... and all
  int iterations = 5;
  int warmup = 1;
  bool graph = false;  // the timed runs are captured and replayed
  std::int64_t check = 4;
  std::string json, csv;
};

void add_calibrate_options(CLI::App& app, CalibrateOptions& options);
void add_plan_options(CLI::App& app, PlanOptions& options);
void add_scale_options(CLI::App& app, ScaleOptions& options);

extern const char* const kCalibrateFooter;
extern const char* const kPlanFooter;
extern const char* const kScaleFooter;

}  // namespace longspan::launcher
