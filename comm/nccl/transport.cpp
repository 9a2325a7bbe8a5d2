#include "comm/nccl/transport.hpp"

#include <fmt/format.h>

#include <type_traits>

#include "comm/controlled.hpp"
#include "comm/gpu.hpp"
#include "comm/nccl/windows.hpp"
#include "comm/self.hpp"
#include "longspan/buffer.hpp"
#include "longspan/info.hpp"
#include "src/check.hpp"

namespace longspan::comm {
namespace {

std::string version_text(int code) {
  return fmt::format("{}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
}

/// The library that runs may be another than the one whose header was compiled.
std::string library_name() {
  int found = 0;
  ncclGetVersion(&found);
  std::string name = "NCCL " + version_text(found);
  if (found / 100 != NCCL_VERSION_CODE / 100)
    name += fmt::format(" (longspan was built with {}: expect trouble)",
                        version_text(NCCL_VERSION_CODE));
  return name;
}

std::string gpu_name() {
  int device = 0;
  cudaDeviceProp properties{};
  LONGSPAN_CUDA(cudaGetDevice(&device));
  LONGSPAN_CUDA(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

void copy_on(Stream stream, const void* from, void* to, std::size_t bytes) {
  if (from != to && bytes > 0)
    LONGSPAN_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda(stream)));
}

class NcclTransport final : public ControlledTransport {
 public:
  NcclTransport(std::shared_ptr<Link> link, std::unique_ptr<Control> control, const Place& place)
      : ControlledTransport(std::move(control)), link_(std::move(link)), place_(place) {}

  /// The end of NCCL's communicator waits for the peers, and says that all have closed the windows.
  /// A rank that has not does not come to it.
  ~NcclTransport() override {
    control().flush();
    if (windows_->failed()) link_->abort();
    windows_->end(link_->end());
  }

  Device device() const override { return Device::cuda; }
  std::string describe() const override {
    return fmt::format("{} | {} | {}", library_name(), gpu_name(), comm::describe(size(), place_));
  }

  void all_gather(const void* send, void* recv, std::size_t bytes, Stream stream, const char* step,
                  std::uint64_t* said) override {
    queue(stream, step, [&](ncclComm_t comm) {
      const auto gather = [&] {
        return ncclAllGather(send, recv, bytes, ncclInt8, comm, cuda(stream));
      };
      if (!said) return gather();
      ncclGroupStart();  // both in one launch
      ncclAllGather(said + rank(), said, sizeof *said, ncclInt8, comm, cuda(stream));
      gather();
      return ncclGroupEnd();  // an error of any call in the group comes out here
    });
  }

  void all_to_all(const void* send, void* recv, std::size_t bytes, Stream stream,
                  const char* step) override {
    queue(stream, step, [&](ncclComm_t comm) {
      ncclGroupStart();
      for (int p = 0; p < size(); ++p) {
        const auto at = static_cast<std::size_t>(p) * bytes;
        ncclSend(static_cast<const char*>(send) + at, bytes, ncclInt8, p, comm, cuda(stream));
        ncclRecv(static_cast<char*>(recv) + at, bytes, ncclInt8, p, comm, cuda(stream));
      }
      return ncclGroupEnd();  // an error of any call in the group comes out here
    });
  }

  void shift(const void* send, void* recv, std::size_t bytes, int distance, Stream stream,
             const char* step) override {
    const int ahead = (distance % size() + size()) % size();
    if (ahead == 0) {
      control().fate().check();
      return copy_on(stream, send, recv, bytes);
    }
    queue(stream, step, [&](ncclComm_t comm) {
      ncclGroupStart();
      ncclSend(send, bytes, ncclInt8, (rank() + ahead) % size(), comm, cuda(stream));
      ncclRecv(recv, bytes, ncclInt8, (rank() - ahead + size()) % size(), comm, cuda(stream));
      return ncclGroupEnd();
    });
  }

  std::shared_ptr<const PeerView> open_windows(std::uint32_t layer, std::size_t bytes,
                                               std::string& why) override {
    const std::shared_ptr<Windows> windows = Windows::open(*this, bytes, why, windows_);
    if (!windows) return nullptr;
    windows->serve(layer);
    return {windows, &windows->view()};
  }

  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    return or_abort([&] { return ControlledTransport::gather(mine, step); });
  }

  void check(const char* step) override {
    or_abort([&] {
      control().fate().check();
      check_reports(step);
    });
  }

  void wait(Stream stream, const char* step) override {
    or_abort([&] {
      link_->wait(control(), cuda(stream), step);
      check_reports(step);
    });
  }

  void abort(const std::string& why) noexcept override {
    ControlledTransport::abort(why);
    windows_->abort();
    link_->abort();
  }

 private:
  /// Whatever ends the communicator frees kernels that wait in windows, and keeps their memory.
  template <class Work>
  std::invoke_result_t<const Work&> or_abort(const Work& work) {
    try {
      return work();
    } catch (...) {
      windows_->abort();
      throw;
    }
  }

  void queue(Stream stream, const char* step, const Link::Call& call) {
    or_abort([&] { link_->queue(control(), cuda(stream), step, call); });
  }

  /// An exchange that went wrong in one layer ends the communicator for all: whose it was is said.
  void check_reports(const char* step) {
    PeerReport report;
    std::uint32_t layer = 0;
    windows_->for_each([&](const Windows& windows) {
      if (report.kind != PeerReport::none) return;
      report = windows.report();
      layer = windows.layer();
    });
    if (report.kind == PeerReport::none) return;
    if (report.kind == PeerReport::differs)
      disagree({layer, report.run}, static_cast<int>(report.rank), step);
    control().fate().check();
    control().timed_out(step, control().patience());  // the roll call says who is missing
  }

  std::shared_ptr<Link> link_;
  Place place_;
  std::shared_ptr<WindowSet> windows_ = std::make_shared<WindowSet>();
};

class GpuSelf final : public SelfTransport {
 public:
  using SelfTransport::SelfTransport;
  Device device() const override { return Device::cuda; }
  std::string describe() const override { return gpu_name() + " | 1 rank"; }

  void wait(Stream stream, const char* step) override {
    control().fate().check();
    Patience patient(deadline());
    wait_for_stream(cuda(stream), patient, [&] {
      if (patient.over()) control().timed_out(step, patient.waited());
    });
  }

 protected:
  void copy(const void* from, void* to, std::size_t bytes, Stream stream) override {
    copy_on(stream, from, to, bytes);
  }
};

}  // namespace

std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Link> link,
                                          std::unique_ptr<Control> control, const Place& place) {
  auto transport = std::make_shared<NcclTransport>(std::move(link), std::move(control), place);
  const Buffer first(Device::cuda, 16), all(Device::cuda, 16 * transport->size());
  transport->all_gather(first.data(), all.data(), 16, {}, "first exchange", nullptr);
  transport->wait({}, "first exchange");
  return transport;
}

std::shared_ptr<Transport> gpu_self(milliseconds deadline) {
  if (gpu_count() == 0)
    throw Unsupported(
        "Device cuda was asked for, but this process sees no GPU: check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or use device host.");
  return std::make_shared<GpuSelf>(deadline);
}

}  // namespace longspan::comm
