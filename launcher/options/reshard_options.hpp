// The options of `longspan reshard`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longspan/shard.hpp"

namespace CLI {
class App;
}

namespace longspan::launcher {

/// One of the two caches.
struct CacheOptions {
  std::string shard = "contiguous";  // as given
  Layout layout = Layout::contiguous;
  std::int64_t block = kSegment;
  int first_rank = 0;
  int ranks = 0;  // 0: all from first_rank on
  int page = 0;   // keys in a page; 0: no pages
};

struct ReshardCommand {
  CacheOptions from, to;
  std::int64_t kv = 16384;  // keys of each sequence
  int batch = 1;
  std::vector<std::int64_t> lengths;  // keys of each sequence, in place of these
  int kv_heads = 8;
  int dim = 128;
  int value_dim = -1;  // -1: dim; 0: values are the first columns of the keys
  std::string dtype = "bf16";

  int iterations = 5;
  int warmup = 1;
  std::string json;
};

void add_reshard_options(CLI::App& app, ReshardCommand& options);
/// Reads --from and --to; throws CLI::ValidationError.
void read_rules(ReshardCommand& options);

extern const char* const kReshardFooter;

}  // namespace longspan::launcher
