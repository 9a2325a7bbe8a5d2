#include "comm/nccl/transport.hpp"

#include <fmt/format.h>

#include <exception>
#include <type_traits>
#include <vector>

#include "comm/controlled.hpp"
#include "comm/cuda/side_stream.hpp"
#include "comm/cuda/stream.hpp"
#include "comm/nccl/control.hpp"
#include "comm/nccl/peer_buffers.hpp"
#include "comm/nccl/receive_buffer.hpp"
#include "longspan/buffer.hpp"
#include "longspan/storage.hpp"
#include "src/base/check.hpp"
#include "src/base/device_guard.hpp"

namespace longspan::comm {
namespace {

std::string version_text(int code) {
  return fmt::format("{}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
}

/// The name of the library that runs, which may differ from that of the compiled header.
std::string library_name() {
  int found = 0;
  ncclGetVersion(&found);
  std::string name = "NCCL " + version_text(found);
  if (found / 100 != NCCL_VERSION_CODE / 100)
    name += fmt::format(" (longspan was built with {}: expect trouble)",
                        version_text(NCCL_VERSION_CODE));
  return name;
}

ncclDataType_t nccl_type(DType dtype) {
  return dtype == fp32 ? ncclFloat32 : dtype == fp16 ? ncclFloat16 : ncclBfloat16;
}

/// A transport over NCCL. NCCL orders the transfers of a communicator on any streams, so
/// collectives on a caller's stream and on the side stream need no order of ours.
class NcclTransport final : public ControlledTransport {
 public:
  NcclTransport(std::shared_ptr<Link> link, std::shared_ptr<Control> control, const Place& place)
      : ControlledTransport(std::move(control)),
        link_(std::move(link)),
        place_(place),
        gpu_(current_gpu()) {}

  /// Ends NCCL's communicator, which waits for the peers: all have then closed the peer buffers,
  /// since a rank that has not closed them does not come to it. After a failure here or in its
  /// parent, work may never end, so nothing waits.
  ~NcclTransport() override {
    control().flush();
    if (control().outcome().failed() || peer_buffers_->failed()) link_->abort();
    peer_buffers_->end(link_->end());
    if (control().outcome().failed()) side_.abandon();
  }

  /// Checks NCCL between the ranks by a first exchange, which also makes its connections, and makes
  /// what transfers beside the caller's stream need.
  void prepare() {
    side_.make();
    link_->on_abort([set = peer_buffers_] { set->abort(); });
    meet("first exchange");
  }

  Device device() const override { return Device::cuda; }
  int ranks_per_node() const override { return place_.ranks_per_node; }
  int gpu() const override { return gpu_; }
  std::string describe() const override {
    return fmt::format("{} | {} | {}", library_name(), name_of_gpu(gpu_),
                       comm::describe(size(), place_));
  }

  std::shared_ptr<const PeerView> open_peer_buffers(std::uint32_t layer, std::size_t bytes,
                                                    std::string& why) override {
    const std::shared_ptr<PeerBuffers> peer_buffers =
        PeerBuffers::open(*this, bytes, why, peer_buffers_);
    if (!peer_buffers) return nullptr;
    peer_buffers->serve(layer);
    return {peer_buffers, &peer_buffers->view()};
  }

  std::shared_ptr<std::byte> open_receive_buffer(std::size_t bytes, std::string& why) override {
    const std::shared_ptr<ReceiveBuffer> buffer =
        ReceiveBuffer::open(*this, bytes, why, peer_buffers_);
    if (!buffer) return nullptr;
    std::erase_if(receive_buffers_, [](const auto& one) { return one.expired(); });
    receive_buffers_.push_back(buffer);
    return {buffer, buffer->data()};
  }

  void keep_place(Stream stream, int starts) override {
    or_abort([&] { side_.keep_place(cuda(stream), starts); });
  }

  void forget_place() noexcept override { side_.forget_place(); }

  /// By copy engines into a receive buffer, or by one kernel of NCCL's.
  Transfers start_shifts(std::span<const Piece> pieces, int distance, Stream stream,
                         const char* step) override {
    const int ahead = (distance % size() + size()) % size();
    if (ahead == 0 || pieces.empty())
      return Transport::start_shifts(pieces, distance, stream, step);
    return together(
        start_beside(stream, [&](cudaStream_t side) { queue(pieces, ahead, side, step); }));
  }

  PutRanks begin_puts(const std::byte* buffer, Stream stream, const char* step) override {
    const std::shared_ptr<const ReceiveBuffer> found = receive_buffer_at(buffer);
    if (!found) return Transport::begin_puts(buffer, stream, step);
    control().outcome().check();
    link_->open_watch(cuda(stream), step);
    return found->put_ranks();
  }

  void end_puts(const std::byte* buffer, std::size_t received, Stream stream,
                const char* step) override {
    if (!receive_buffer_at(buffer)) return Transport::end_puts(buffer, received, stream, step);
    or_abort([&] { link_->close_watch(control(), cuda(stream), step); });
    count_received(received);
  }

  std::byte* place_at(std::byte* place, int rank) override {
    const std::shared_ptr<const ReceiveBuffer> found = receive_buffer_at(place);
    return found ? found->place_at(place, rank) : nullptr;
  }

  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    return or_abort([&] { return ControlledTransport::gather(mine, step); });
  }

  void check(const char* step) override {
    or_abort([&] {
      control().outcome().check();
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
    end_kernels();
  }

 protected:
  /// Queues on the caller's own stream, where there is no transfer to wait for.
  void run(const Collective& collective, Stream stream, const char* step) override {
    or_abort([&] { queue(collective, cuda(stream), step); });
  }

  int start(const Collective& collective, Stream stream, const char* step) override {
    return start_beside(stream, [&](cudaStream_t side) { queue(collective, side, step); });
  }

  void finish(int number, Stream stream) override {
    side_.give_back(number);  // the next start, at the earliest, records its event anew
    or_abort([&] {
      control().outcome().check();
      side_.join(number, cuda(stream));
    });
  }

  bool test(int number) override {
    return or_abort([&] {
      control().outcome().check();
      return side_.is_done(number);
    });
  }

  void drop(int number) noexcept override { side_.give_back(number); }

  /// Splits. A split of an NCCL communicator with queued work may never end, so that work is waited
  /// for. All ranks come to it, whether they get a part or not.
  std::shared_ptr<Transport> branch(const Group& group) override {
    const char* const step = "split of the communicator";
    const ncclComm_t comm = or_abort([&] {
      meet(step);
      return link_->split(control(), group.color, group.rank, step);
    });
    if (group.members.empty()) return nullptr;
    std::shared_ptr<Control> own = control().branch(group);
    try {
      auto link = std::make_shared<Link>(comm, own ? own->patience() : deadline());
      if (!own) {  // messages travel over NCCL itself
        own = nccl_control(link, group.rank, static_cast<int>(group.members.size()), deadline());
        own->set_parent(control(), group);
      }
      link->settle(*own, step);
      const Place place = find_place(*own);
      auto child = std::make_shared<NcclTransport>(std::move(link), own, place);
      std::erase_if(children_, [](const auto& one) { return one.expired(); });
      children_.push_back(child);
      child->prepare();
      return child;
    } catch (const std::exception& error) {
      if (own) own->tell(gave_up(*own, error.what()));  // where only this rank fails
      throw;
    }
  }

 private:
  /// Does `work`. Any failure that ends the communicator frees kernels that wait in peer buffers,
  /// and keeps their memory.
  template <class Work>
  std::invoke_result_t<const Work&> or_abort(const Work& work) {
    try {
      return work();
    } catch (...) {
      peer_buffers_->abort();
      if (control().outcome().failed()) end_children();
      throw;
    }
  }

  /// Starts `work` on the side stream, after the caller's work; returns the transfer's number.
  template <class Work>
  int start_beside(Stream stream, const Work& work) {
    return or_abort([&] {
      control().outcome().check();
      return side_.start(cuda(stream), work);
    });
  }

  /// Ends the children too.
  void end_children() noexcept {
    for (const auto& one : children_)
      if (const auto child = one.lock()) child->end_kernels();
  }
  void end_kernels() noexcept {
    peer_buffers_->abort();
    link_->abort();
    end_children();
  }

  /// Returns when all ranks have come, and all earlier work is done.
  void meet(const char* step) {
    const Buffer first(Device::cuda, 16), all(Device::cuda, 16 * static_cast<std::size_t>(size()));
    const Collective gather{
        .kind = Collective::all_gather, .send = first.data(), .recv = all.data(), .bytes = 16};
    link_->queue(control(), side_.get(), step,
                 [&](ncclComm_t comm) { return call(gather, comm, side_.get()); });
    link_->wait(control(), side_.get(), step);
  }

  void queue(const Collective& collective, cudaStream_t stream, const char* step) {
    const int ahead = (collective.place % size() + size()) % size();
    if (collective.kind == Collective::shift && ahead > 0) {
      const Piece piece{collective.send, collective.bytes, collective.recv, collective.received};
      return queue({&piece, 1}, ahead, stream, step);
    }
    link_->queue(control(), stream, step,
                 [&](ncclComm_t comm) { return call(collective, comm, stream); });
    count_received(bytes_from_others(collective));
  }

  /// Queues a shift between ranks, by a distance from 1 to size - 1.
  void queue(std::span<const Piece> pieces, int ahead, cudaStream_t stream, const char* step) {
    const std::shared_ptr<const ReceiveBuffer> buffer = receive_buffer_at(pieces[0].recv);
    link_->queue(control(), stream, step, [&](ncclComm_t comm) {
      if (!buffer) return shift(pieces, ahead, comm, stream);
      buffer->shift(pieces, ahead, stream);
      return ncclSuccess;
    });
    for (const Piece& piece : pieces) count_received(piece.received);
  }

  /// The receive buffer that a shift receives into; null: NCCL does the shift.
  std::shared_ptr<const ReceiveBuffer> receive_buffer_at(const void* memory) const {
    for (const auto& one : receive_buffers_)
      if (auto buffer = one.lock(); buffer && buffer->holds(memory)) return buffer;
    return nullptr;
  }

  ncclResult_t shift(std::span<const Piece> pieces, int ahead, ncclComm_t comm,
                     cudaStream_t stream) const {
    const int to = (rank() + ahead) % size(), from = (rank() - ahead + size()) % size();
    ncclGroupStart();
    for (const Piece& piece : pieces) {
      if (piece.sent > 0) ncclSend(piece.send, piece.sent, ncclInt8, to, comm, stream);
      if (piece.received > 0) ncclRecv(piece.recv, piece.received, ncclInt8, from, comm, stream);
    }
    return ncclGroupEnd();
  }

  std::size_t bytes_from_others(const Collective& collective) const {
    if (collective.kind == Collective::shift) return 0;  // to itself
    return static_cast<std::size_t>(size() - 1) * collective.bytes;
  }

  /// Calls NCCL. For calls in a group, an error is reported at the group's end.
  ncclResult_t call(const Collective& collective, ncclComm_t comm, cudaStream_t stream) const {
    const std::size_t bytes = collective.bytes;
    switch (collective.kind) {
      case Collective::all_gather: {
        const auto gather = [&] {
          return ncclAllGather(collective.send, collective.recv, bytes, ncclInt8, comm, stream);
        };
        if (!collective.digests) return gather();
        ncclGroupStart();
        gather_digests(collective, comm, stream);
        gather();
        return ncclGroupEnd();
      }
      case Collective::all_to_all:
        ncclGroupStart();
        if (collective.digests) gather_digests(collective, comm, stream);
        for (int p = 0; p < size(); ++p) {
          const auto at = static_cast<std::size_t>(p) * bytes;
          ncclSend(static_cast<const char*>(collective.send) + at, bytes, ncclInt8, p, comm,
                   stream);
          ncclRecv(static_cast<char*>(collective.recv) + at, bytes, ncclInt8, p, comm, stream);
        }
        return ncclGroupEnd();
      case Collective::shift:  // to itself: others are queued as pieces
        copy_on(stream, collective.send, collective.recv, bytes);
        return ncclSuccess;
      case Collective::reduce_scatter:
        return ncclReduceScatter(collective.send, collective.recv,
                                 bytes / size_of(collective.dtype), nccl_type(collective.dtype),
                                 ncclSum, comm, stream);
    }
    return ncclInvalidUsage;
  }

  /// Gathers every rank's digest of its run, in one group, and so one launch, with the data.
  void gather_digests(const Collective& collective, ncclComm_t comm, cudaStream_t stream) const {
    ncclAllGather(collective.digests + rank(), collective.digests, sizeof *collective.digests,
                  ncclInt8, comm, stream);
  }

  /// Reports a failed exchange. In any layer it ends the communicator for all, and the report names
  /// the layer.
  void check_reports(const char* step) {
    PeerReport report;
    std::uint32_t layer = 0;
    peer_buffers_->for_each([&](const PeerBuffers& peer_buffers) {
      if (report.kind != PeerReport::none) return;
      report = peer_buffers.report();
      layer = peer_buffers.layer();
    });
    if (report.kind == PeerReport::none) return;
    if (report.kind == PeerReport::differs)
      disagree({layer, report.run}, static_cast<int>(report.rank), step);
    control().outcome().check();
    control().timed_out(step, control().patience());  // the roll call names the missing rank
  }

  std::shared_ptr<Link> link_;
  Place place_;
  int gpu_;
  std::shared_ptr<PeerBufferSet> peer_buffers_ = std::make_shared<PeerBufferSet>();
  SideStream side_;
  std::vector<std::weak_ptr<const ReceiveBuffer>> receive_buffers_;
  std::vector<std::weak_ptr<NcclTransport>> children_;
};

}  // namespace

std::shared_ptr<Transport> nccl_transport(std::shared_ptr<Link> link,
                                          std::shared_ptr<Control> control, const Place& place) {
  auto transport = std::make_shared<NcclTransport>(std::move(link), std::move(control), place);
  try {
    transport->prepare();
  } catch (const BackendError& error) {
    transport->abort(error.what());
    throw;
  }
  return transport;
}

}  // namespace longspan::comm
