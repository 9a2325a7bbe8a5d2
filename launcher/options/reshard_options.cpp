#include "launcher/options/reshard_options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "launcher/options/numbers.hpp"
#include "launcher/options/read_shard.hpp"
#include "launcher/options/spelling.hpp"

namespace longspan::launcher {
namespace {

void add_cache(CLI::App& app, CacheOptions& o, const std::string& side, const char* group) {
  const auto option = [&](const std::string& rest, auto& value, const std::string& what) {
    return app.add_option("--" + side + rest, value, what)->group(group)->capture_default_str();
  };
  option("", o.shard, shard_text());
  option("-first", o.first_rank, "The first rank that holds a part")
      ->transform(whole(0, kMostHeads));
  option("-ranks", o.ranks, "How many ranks hold a part, the first included; 0: all that follow")
      ->transform(whole(0, kMostHeads));
  option("-page", o.page, "Keys in a page; 0: no pages")->transform(whole(0, kMostHeads));
}

}  // namespace

const char* const kReshardFooter = R"(Examples
  mpirun -np 4 longspan reshard --from zigzag --to-ranks 2 --to-page 16
      from four ranks of a prefill to pages of 16 keys on two of them
  mpirun -np 3 longspan reshard --from interleaved:128 --from-ranks 2 \
      --to-first 2 --to-page 16 --kv 65536 --batch 4
      from two ranks to a third)";

void add_reshard_options(CLI::App& app, ReshardCommand& o) {
  add_cache(app, o.from, "from", "The old cache");
  add_cache(app, o.to, "to", "The new cache");

  const char* keys = "Its keys and values, made from a seed";
  auto* kv = app.add_option("--kv", o.kv, "Keys of a sequence")
                 ->transform(whole(std::int64_t{0}, kMostRows))
                 ->group(keys)
                 ->capture_default_str();
  auto* batch = app.add_option("--batch", o.batch, "Sequences")
                    ->transform(whole(1, 65536))
                    ->group(keys)
                    ->capture_default_str();
  app.add_option("--lengths", o.lengths, "Keys of each of several sequences")
      ->transform(whole(std::int64_t{0}, kMostRows))
      ->excludes(kv, batch)
      ->group(keys);
  app.add_option("--kv-heads", o.kv_heads, "Heads of keys and values")
      ->transform(whole(1, kMostHeads))
      ->group(keys)
      ->capture_default_str();
  app.add_option("--dim", o.dim, "Dimension of a head")
      ->transform(whole(1, kMostHeads))
      ->group(keys)
      ->capture_default_str();
  app.add_option("--value-dim", o.value_dim,
                 "Dimension of a value; 0: the values are the first columns of the keys [--dim]")
      ->transform(whole(0, kMostHeads))
      ->group(keys);
  app.add_option("--dtype", o.dtype, "fp32, fp16, bf16, e4m3 or e5m2")
      ->check(one_of({"fp32", "fp16", "bf16", "e4m3", "e5m2"}))
      ->group(keys)
      ->capture_default_str();

  const char* measure = "Measuring";
  add_run_counts(app, o, 0, measure);
  app.add_option("--json", o.json, "The measured record")
      ->check(file_name())
      ->type_name("FILE")
      ->group(measure);
}

void read_rules(ReshardCommand& o) {
  read_rule("--from", o.from.shard, o.from.layout, o.from.block);
  read_rule("--to", o.to.shard, o.to.layout, o.to.block);
}

}  // namespace longspan::launcher
