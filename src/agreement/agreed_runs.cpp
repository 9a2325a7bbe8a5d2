#include "src/agreement/agreed_runs.hpp"

#include <cstddef>

namespace longspan {

AgreedRuns::AgreedRuns(const Communicator& world, const char* call, NamedValues options)
    : comm_(comm::transport_of(world)), call_(call) {
  if (comm_.size() == 1) return;
  options.insert(options.begin(), {"call", call});
  history_ = std::make_shared<RunHistory>(std::move(options));
  layer_ = comm_.enlist(history_);
  history_->set_layer(layer_);
  comm_.begin({layer_, 0});
  agree(world, history_->describe(0), "making of the layer");
}

void AgreedRuns::allocate(const kernels::AttentionKernels& kernels, bool contents) {
  kernels_ = &kernels;
  if (!history_) return;
  const auto words = [&](std::size_t count) {
    const auto bytes = kernels.shared_memory(count * sizeof(std::uint64_t));
    return std::shared_ptr<std::uint64_t>(bytes, reinterpret_cast<std::uint64_t*>(bytes.get()));
  };
  report_ = words(1);
  constexpr std::size_t kWords = std::size_t{RunHistory::kRuns} * RunHistory::kWordsOfRun;
  if (contents) history_->compare_contents(words(kWords));
}

void AgreedRuns::lay_out(Parts& memory) {
  digests_ = memory.take_array<std::uint64_t>(static_cast<std::size_t>(comm_.size()));
}

AgreedRuns::Begun AgreedRuns::begin(const RunDescription& description, Stream stream) {
  const std::uint32_t run = history_->add(description);
  comm_.begin({layer_, run});
  Begun begun;
  begun.own_digest = {kernels::mix(history_->hash() + run) + description.hash(), nullptr,
                      digests_ + comm_.rank()};
  if (std::uint64_t* words = history_->words(run)) {
    const kernels::DigestParams arrays = description.arrays(words, run);
    kernels_->digest(arrays, stream);
    begun.own_digest.contents = words + arrays.count;
  }
  begun.digests = digests_;
  begun.headers = {digests_, comm_.rank(), comm_.size(), run, report_.get()};
  return begun;
}

void AgreedRuns::check() const {
  if (!report_) return;
  const std::uint64_t found = *static_cast<const volatile std::uint64_t*>(report_.get());
  if (found == 0) return;
  comm_.disagree({layer_, static_cast<std::uint32_t>(found >> 32)},
                 static_cast<int>(found & 0xffffffffu) - 1, call_);
}

}  // namespace longspan
