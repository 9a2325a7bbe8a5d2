#include "launcher/bench/decode_step.hpp"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>

#include "launcher/problem/elements.hpp"
#include "launcher/problem/memory.hpp"
#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

Options timed_on(Device device, Options options) {
  options.debug.profile =
      device == Device::host;  // on a GPU, marks would be captured with the work
  return options;
}

template <class T>
std::vector<T> downloaded(const Buffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  buffer.download(values.data());
  return values;
}

}  // namespace

DecodeStep::DecodeStep(const Communicator& world, const DecodeShape& shape,
                       std::function<void()> pulse)
    : shape_(shape),
      world_(world),
      pulse_(std::move(pulse)),
      capacity_(shape.capacity(world.size())),
      queue_(world.device()),
      layer_(world, timed_on(world.device(), shape.fitted())),
      inputs_(shape) {
  const Device device = world.device();
  if (device == Device::cuda && world.size() > 1) {
    Options alone = shape.fitted();
    alone.keys = {Layout::interleaved};
    own_layer_.emplace(self(device), alone);
  }
  lengths_ = {.batch = shape.batch,
              .tokens = shape.tokens,
              .shard = shape.shard(world.rank(), world.size())};
  make_table();
  k_ = fill_caches(inputs_.k);
  v_ = fill_caches(inputs_.v);
  wait();  // until the caches are filled

  std::vector<std::int32_t> starts(shape.batch + 1);
  for (int b = 0; b <= shape.batch; ++b) starts[b] = b * shape.tokens;
  query_start_ = on_device(device, starts);
  q_ = filled(device, inputs_.q.row_bytes() * inputs_.q.rows, [&](std::byte* to) {
    parallel_for(inputs_.q.rows, shape.options.threads, [&](std::int64_t i) {
      inputs_.q.read(i, 0, inputs_.q.row_size(), to + i * inputs_.q.row_bytes());
    });
  });
  const std::size_t out_rows = shape.layers * shape.rows() * shape.options.heads;
  out_ =
      Buffer(device,
             out_rows * storage_of(shape.options.dtypes.compute).row_bytes(shape.options.head_dim));
  lse_ = Buffer(device, out_rows * sizeof(float));
  kv_len_ = Buffer(device, shape.batch * sizeof(std::int32_t));
  own_len_ = Buffer(device, shape.batch * sizeof(std::int32_t));
  lengths_.whole = static_cast<std::int32_t*>(kv_len_.data());
  lengths_.own = static_cast<std::int32_t*>(own_len_.data());
  make_args();
  restart(0);
}

/// Makes page tables in an order unlike any layout's: page i of the tables is page 5 i + 3 of the
/// memory, or uses the next multiplier that has no divisor in common with their number.
void DecodeStep::make_table() {
  if (shape_.page == 0) return;
  const std::int64_t pages = shape_.batch * capacity_ / shape_.page;
  std::int64_t step = 5;
  while (std::gcd(step, pages) != 1) ++step;
  std::vector<std::int32_t> table(pages);
  for (std::int64_t i = 0; i < pages; ++i)
    table[i] = static_cast<std::int32_t>((i * step + 3) % pages);
  table_ = on_device(world_.device(), table);
}

DecodeStep::Memory DecodeStep::fill_caches(const CacheInputs& inputs) {
  const Device device = world_.device();
  const Source& fresh = inputs.fresh;
  Memory memory;
  memory.scale = on_device(device, inputs.scale);
  memory.fresh = filled(device, fresh.row_bytes() * fresh.rows, [&](std::byte* to) {
    for (std::int64_t i = 0; i < fresh.rows; ++i)
      fresh.read(i, 0, fresh.row_size(), to + i * fresh.row_bytes());
  });
  const Buffer block = on_device(device, inputs.block);
  for (int c = 0; c < shape_.caches; ++c) {
    pulse_();
    memory.caches.emplace_back(device, shape_.cache_bytes(world_.size()) / 2);
    fill(device,
         {.block = static_cast<const std::byte*>(block.data()),
          .pattern = inputs.pattern(c),
          .row_bytes = static_cast<std::int64_t>(shape_.row_bytes()),
          .cache = static_cast<std::byte*>(memory.caches.back().data()),
          .batch = shape_.batch,
          .capacity = capacity_,
          .table = table_.bytes() > 0 ? static_cast<const std::int32_t*>(table_.data()) : nullptr,
          .page = std::max(shape_.page, 1),
          .shard = lengths_.shard,
          .kv_len = shape_.kv_len},
         shape_.options.threads, queue_.stream());
  }
  wait();  // before the block is freed
  return memory;
}

void DecodeStep::make_args() {
  const Options& o = shape_.options;
  const Device device = world_.device();
  const std::int64_t rows = shape_.rows(), page = shape_.page;
  // Views a buffer from element `first` on as a dense tensor.
  const auto view = [device](const Buffer& buffer, DType dtype, std::int64_t first,
                             std::initializer_list<std::int64_t> extents) {
    auto* const data = static_cast<std::byte*>(buffer.data()) + storage_of(dtype).bytes(first);
    return Tensor(data, dtype, extents, device);
  };
  const auto cache = [&](const Memory& memory, int layer) {
    const Buffer& buffer = memory.caches[layer % shape_.caches];
    if (page == 0)
      return view(buffer, shape_.kv_dtype(), 0, {shape_.batch, capacity_, o.kv_heads, o.head_dim});
    return view(buffer, shape_.kv_dtype(), 0,
                {shape_.batch * capacity_ / page, page, o.kv_heads, o.head_dim});
  };
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const std::int64_t new_at = layer % shape_.caches * rows * o.kv_heads * o.head_dim;
    const std::int64_t row_at = layer * rows * o.heads;
    Append append{.new_k = view(k_.fresh, o.dtypes.compute, new_at, {rows, o.kv_heads, o.head_dim}),
                  .new_v = view(v_.fresh, o.dtypes.compute, new_at, {rows, o.kv_heads, o.head_dim}),
                  .k = cache(k_, layer),
                  .v = cache(v_, layer),
                  .query_start = array<std::int32_t>(query_start_, device),
                  .kv_len = array<std::int32_t>(kv_len_, device),
                  .k_scale = array<float>(k_.scale, device),
                  .v_scale = array<float>(v_.scale, device)};
    if (page > 0)
      append.block_table = {static_cast<const std::int32_t*>(table_.data()),
                            {shape_.batch, capacity_ / page},
                            device};
    AttentionArgs args{
        .q = view(q_, o.dtypes.compute, row_at * o.head_dim, {rows, o.heads, o.head_dim}),
        .k = append.k,
        .v = append.v,
        .out = view(out_, o.dtypes.compute, row_at * o.head_dim, {rows, o.heads, o.head_dim}),
        .lse = Lse::tokens_heads(view(lse_, DType::fp32, row_at, {rows, o.heads})),
        .query_start = append.query_start,
        .kv_len = append.kv_len,
        .block_table = append.block_table,
        .k_scale = append.k_scale,
        .v_scale = append.v_scale,
        .new_k = device == Device::cuda ? append.new_k : Tensor(),
        .new_v = device == Device::cuda ? append.new_v : Tensor()};
    appends_.push_back(append);
    args_.push_back(args);
    if (own_layer_) {  // its keys end at the same place, so that new ones follow them on every rank
      args.kv_len = array<std::int32_t>(own_len_, device);
    }
    own_args_.push_back(args);
    args.new_k = args.new_v = {};
    read_args_.push_back(args);
  }
}

void DecodeStep::queue(Part part, Stream stream) {
  using Clock = std::chrono::steady_clock;
  const bool host = world_.device() == Device::host;
  double append_ms = 0, attend_ms = 0;
  grow(world_.device(), lengths_, stream);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const auto begin = Clock::now();
    if (host || part == Part::append) layer_.append(appends_[layer], stream);
    append_ms += std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    Attention& own = own_layer_ ? *own_layer_ : layer_;
    if (part == Part::whole) layer_.run(args_[layer], stream);
    if (part == Part::own) own.run(own_args_[layer], stream);
    if (part == Part::read) own.run(read_args_[layer], stream);
    if (!host) continue;
    attend_ms += layer_.phases().attend;
    pulse_();
  }
  if (!host) return;
  spent_.append.push_back(append_ms);
  spent_.attend.push_back(attend_ms);
}

void DecodeStep::restart(std::int64_t done) {
  const auto kv_len = static_cast<std::int32_t>(shape_.length_after(done));
  const auto own = static_cast<std::int32_t>(lengths_.shard.local_len(kv_len));
  kv_len_.upload(std::vector<std::int32_t>(shape_.batch, kv_len).data());
  own_len_.upload(std::vector<std::int32_t>(shape_.batch, own).data());
  for (Buffer* buffer : {&out_, &lse_})
    buffer->upload(std::vector<std::byte>(buffer->bytes(), std::byte{0xff}).data());
}

void DecodeStep::check_lengths(std::int64_t done) const {
  const std::int64_t kv_len = shape_.length_after(done);
  const std::int64_t own = lengths_.shard.local_len(kv_len);
  const auto whole = downloaded<std::int32_t>(kv_len_), owned = downloaded<std::int32_t>(own_len_);
  for (int b = 0; b < shape_.batch; ++b)
    if (whole[b] != kv_len || owned[b] != own)
      throw Error(ErrorKind::wrong_result,
                  fmt::format("after {} steps sequence {} has {} keys, {} of them here; {} and {} "
                              "were expected: a step was not done, or done twice",
                              done, b, whole[b], owned[b], kv_len, own));
}

void DecodeStep::check_finite(const Answer& outputs) const {
  const std::int64_t row = std::int64_t{shape_.options.heads} * shape_.options.head_dim;
  std::atomic<std::int64_t> strange{0};
  parallel_for(static_cast<std::int64_t>(outputs.rows.size()), shape_.options.threads,
               [&](std::int64_t i) {
                 for (std::int64_t at = i * row; at < (i + 1) * row; ++at)
                   if (!std::isfinite(load(outputs.out.data(), shape_.options.dtypes.compute, at)))
                     ++strange;
               });
  if (strange > 0)
    throw Error(ErrorKind::wrong_result,
                fmt::format("{} of {} elements of the {} layers' outputs are not finite",
                            strange.load(), outputs.rows.size() * row, shape_.layers));
}

Answer DecodeStep::outputs() const {
  Answer answer{std::vector<std::int64_t>(shape_.layers * shape_.rows()),
                downloaded<std::byte>(out_), downloaded<float>(lse_)};
  std::iota(answer.rows.begin(), answer.rows.end(), std::int64_t{0});
  return answer;
}

Judgement DecodeStep::check(std::int64_t done, int samples) {
  Answer all;
  together(world_, "look at the outputs", [&] {
    check_lengths(done);
    all = outputs();
    check_finite(all);
  });
  Problem every;
  every.options = shape_.fitted();
  bits_ = digest(world_, every, all);
  const std::vector<DecodeSample> drawn = draw_samples(shape_, samples, ++checks_);
  if (drawn.empty()) return {};
  pulse_();
  const Problem problem = sampled(shape_, inputs_, drawn, done);
  const Answer answer = sampled(shape_, drawn, all);
  return judge(world_, problem, answer, answer.rows);
}

}  // namespace longspan::launcher
