#include "src/validate.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>
#include <span>

#include "longspan/error.hpp"

namespace longspan {
namespace {

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

std::string shape_text(const Tensor& t) {
  return fmt::format("[{}]", fmt::join(std::span(t.shape.data(), t.dims), ", "));
}

void check_tensor(const Tensor& t, const char* name, DType dtype, Device device) {
  require(t.data != nullptr || t.size() == 0, "{} {} has no data", name, shape_text(t));
  require(t.dtype == dtype, "{} is {}; the layer was made for {}", name, longspan::name(t.dtype),
          longspan::name(dtype));
  require(t.device == device, "{} is on the {}; the layer works on the {}", name,
          longspan::name(t.device), longspan::name(device));
  for (int d = 0; d < t.dims; ++d)
    require(t.shape[d] >= 0, "{} {} has a negative extent", name, shape_text(t));
}

/// [rows, heads, dim] with a dense last dimension.
void check_rows(const Tensor& t, const char* name, std::int64_t heads, const Options& options,
                Device device) {
  check_tensor(t, name, options.dtype, device);
  require(t.dims == 3 && t.shape[1] == heads && t.shape[2] == options.dim,
          "{} is {}; the layer wants [tokens, {}, {}]", name, shape_text(t), heads, options.dim);
  require(t.stride[2] == 1 || t.size() == 0, "{} has stride {} in its last dimension; it must be 1",
          name, t.stride[2]);
}

void check_keys(const Tensor& t, const char* name, const Request& request, const Options& options,
                Device device) {
  check_tensor(t, name, options.dtype, device);
  const bool packed = t.dims == 3;
  const int d = packed ? 1 : 2;
  require((packed || (t.dims == 4 && t.shape[0] >= request.batch)) &&
              t.shape[d] == options.kv_heads && t.shape[d + 1] == options.dim,
          "{} is {}; the layer wants [keys, {}, {}], or [{}, capacity, {}, {}]", name,
          shape_text(t), options.kv_heads, options.dim, request.batch, options.kv_heads,
          options.dim);
  require(t.stride[d + 1] == 1 || t.size() == 0,
          "{} has stride {} in its last dimension; it must be 1", name, t.stride[d + 1]);
  require(packed || t.size() == 0 || t.stride[0] % t.stride[1] == 0,
          "{} has stride {} between sequences, which is not a multiple of the stride {} between "
          "keys; make the cache dense",
          name, t.stride[0], t.stride[1]);
}

void check_shard(const Shard& shard, const char* name, const Request& request,
                 const Communicator& world) {
  require(shard.rank == world.rank() && shard.ranks == world.size(),
          "{} describes rank {} of {}; this is rank {} of {}", name, shard.rank, shard.ranks,
          world.rank(), world.size());
  require(shard.length >= 0, "{} has length {}", name, shard.length);
  require(shard.block > 0, "{} has blocks of {} keys; a block has at least 1", name, shard.block);
  const bool tabled = shard.layout == Layout::ranges || shard.layout == Layout::listed;
  require(!tabled || shard.table != nullptr || (shard.layout == Layout::listed && !shard.listed),
          "{} is {} without a table", name, longspan::name(shard.layout));
  require(!tabled || request.batch == 1, "{} is {}, which describes one sequence; the batch has {}",
          name, longspan::name(shard.layout), request.batch);
}

/// Host only: what lies in the arrays.
void check_lengths(const Request& request, std::int64_t rows) {
  const Shard& shard = request.shard;
  if (shard.layout == Layout::ranges) {
    require(shard.table[0] == 0 && shard.table[shard.ranks] == shard.length,
            "the table of ranges runs from {} to {}; the sequence has keys 0 to {}", shard.table[0],
            shard.table[shard.ranks], shard.length);
    for (int r = 0; r < shard.ranks; ++r)
      require(shard.table[r] <= shard.table[r + 1], "the table of ranges descends at rank {}", r);
  }
  if (shard.layout == Layout::listed) {
    for (std::int64_t i = 0; i < shard.listed; ++i)
      require(shard.table[i] >= 0 && shard.table[i] < shard.length,
              "listed key {} stands at position {}; the sequence has {} keys", i, shard.table[i],
              shard.length);
  }
  if (request.query_start != nullptr) {
    require(request.query_start[0] == 0, "query_start[0] is {}; it must be 0",
            request.query_start[0]);
    for (int b = 0; b < request.batch; ++b)
      require(request.query_start[b] <= request.query_start[b + 1],
              "query_start descends at sequence {}: {} to {}", b, request.query_start[b],
              request.query_start[b + 1]);
    require(request.query_start[request.batch] <= rows,
            "query_start ends at row {}; there are {} rows", request.query_start[request.batch],
            rows);
  }
  const bool packed = request.k.dims == 3;
  std::int64_t keys = 0;
  for (int b = 0; b < request.batch; ++b) {
    const std::int64_t kv_len = request.kv_len ? request.kv_len[b] : shard.length;
    require(kv_len >= 0, "kv_len[{}] is {}", b, kv_len);
    const std::int64_t own = shard.local_len(kv_len);
    keys = packed ? keys + own : own;
    require(keys <= request.k.shape[packed ? 0 : 1],
            "sequence {} has {} keys, of which rank {} holds {} ({} layout); k {} ends before", b,
            kv_len, shard.rank, own, name(shard.layout), shape_text(request.k));
  }
}

}  // namespace

void check_options(const Options& o) {
  const auto usage = [](bool holds, const std::string& what) {
    if (!holds) throw UsageError(what);
  };
  usage(o.heads > 0 && o.kv_heads > 0 && o.heads % o.kv_heads == 0,
        fmt::format("heads {} and kv_heads {}: heads must be a multiple of kv_heads", o.heads,
                    o.kv_heads));
  if (o.dim < 16 || o.dim > 256 || o.dim % 8 != 0)
    throw Unsupported(
        fmt::format("head dim {} is not supported: 16 to 256 in steps of 8 are", o.dim));
  usage(o.max_tokens >= 0 && o.max_tokens <= std::numeric_limits<std::int32_t>::max(),
        fmt::format("max_tokens {} is not in 0 to 2^31 - 1", o.max_tokens));
  usage(o.max_batch >= 1, fmt::format("max_batch {} is below 1", o.max_batch));
  usage(o.mask.window >= 0, fmt::format("window {} is negative; 0 means no window", o.mask.window));
  usage(o.mask.right >= -1, fmt::format("right {} is below -1; -1 means no bound", o.mask.right));
  usage(o.softcap >= 0, fmt::format("softcap {} is negative; 0 means none", o.softcap));
  usage(o.threads >= 0, fmt::format("threads {} is negative; 0 means by itself", o.threads));
}

void check_request(const Request& request, const Options& options, const Communicator& world) {
  const Device device = world.device();
  require(request.batch >= 1 && request.batch <= options.max_batch,
          "the batch has {} sequences; the layer was made for 1 to {}", request.batch,
          options.max_batch);
  require(request.batch == 1 || (request.query_start != nullptr && request.kv_len != nullptr),
          "a batch of {} sequences needs query_start and kv_len", request.batch);

  check_rows(request.q, "q", options.heads, options, device);
  check_rows(request.out, "out", options.heads, options, device);
  require(request.out.shape == request.q.shape, "out is {}; q is {}", shape_text(request.out),
          shape_text(request.q));
  require(request.q.shape[0] <= options.max_tokens,
          "q has {} rows; the layer was made for at most {} (max_tokens)", request.q.shape[0],
          options.max_tokens);
  if (request.lse) {
    check_tensor(request.lse, "lse", DType::fp32, device);
    require(request.lse.dims == 2 && request.lse.shape[0] == request.q.shape[0] &&
                request.lse.shape[1] == options.heads,
            "lse is {}; the layer wants [{}, {}]", shape_text(request.lse), request.q.shape[0],
            options.heads);
  }

  check_keys(request.k, "k", request, options, device);
  check_keys(request.v, "v", request, options, device);
  require(request.k.dims == request.v.dims && request.k.shape == request.v.shape,
          "k is {} and v is {}; they must have one shape", shape_text(request.k),
          shape_text(request.v));
  check_shard(request.shard, "shard", request, world);
  require(request.shard.length <= std::numeric_limits<std::int32_t>::max(),
          "the sequence has {} keys; at most 2^31 - 1 are supported", request.shard.length);

  std::int64_t rows = request.q.shape[0];
  if (options.shard_queries) {
    check_shard(request.query_shard, "query_shard", request, world);
    rows = request.query_shard.length;
    require(rows <= options.max_tokens * world.size(),
            "query_shard has {} rows in all; the layer was made for at most {} on each of {} ranks",
            rows, options.max_tokens, world.size());
    require(request.q.stride[1] == options.dim &&
                request.q.stride[0] == std::int64_t{options.heads} * options.dim,
            "with shard_queries q must be dense; its strides are {} and {}", request.q.stride[0],
            request.q.stride[1]);
    if (request.batch == 1 &&
        (device == Device::host || request.query_shard.layout != Layout::ranges))
      require(request.query_shard.local_len(rows) == request.q.shape[0],
              "query_shard gives rank {} {} of {} rows; q has {}", world.rank(),
              request.query_shard.local_len(rows), rows, request.q.shape[0]);
  }

  if (device == Device::host) {
    check_lengths(request, rows);
  } else if (request.kv_len == nullptr && request.shard.layout != Layout::ranges) {
    const std::int64_t own = request.shard.local_len(request.shard.length);
    require(own <= request.k.shape[request.k.dims == 3 ? 0 : 1],
            "rank {} holds {} of {} keys ({} layout); k is {}", world.rank(), own,
            request.shard.length, name(request.shard.layout), shape_text(request.k));
  }
}

NamedValues describe(const Options& o) {
  return {{"heads", fmt::to_string(o.heads)},
          {"kv_heads", fmt::to_string(o.kv_heads)},
          {"dim", fmt::to_string(o.dim)},
          {"dtype", name(o.dtype)},
          {"causal", o.mask.causal ? "true" : "false"},
          {"window", fmt::to_string(o.mask.window)},
          {"right", fmt::to_string(o.mask.right)},
          {"scale", o.scale ? fmt::format("{}", *o.scale) : "1/sqrt(dim)"},
          {"softcap", fmt::format("{}", o.softcap)},
          {"max_tokens", fmt::to_string(o.max_tokens)},
          {"max_batch", fmt::to_string(o.max_batch)},
          {"shard_queries", o.shard_queries ? "true" : "false"},
          {"invariant", o.invariant ? "true" : "false"},
          {"strategy", o.strategy}};
}

NamedValues describe(const Request& request, bool shard_queries) {
  const auto place = [](const Shard& shard) {
    return fmt::format("{} {}", name(shard.layout), shard.length);
  };
  NamedValues values{{"shard", place(request.shard)},
                     {"block", fmt::to_string(request.shard.block)},
                     {"batch", fmt::to_string(request.batch)}};
  values.emplace_back(
      "queries", shard_queries ? place(request.query_shard) : fmt::to_string(request.q.shape[0]));
  return values;
}

}  // namespace longspan
