#include "comm/tcp/mesh.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>

namespace longspan::comm {
namespace {

constexpr std::uint32_t kMagic = 0x4c53504d;
/// Most bytes read ahead: small messages come with their headers in one call, and of a large one at
/// most this much is copied twice.
constexpr std::size_t kAhead = std::size_t{1} << 14;
/// Moved in one turn, so that one busy connection does not delay the others.
constexpr std::size_t kTurn = std::size_t{1} << 20;
/// No message is this long: such a header is damaged.
constexpr std::uint64_t kMost = std::uint64_t{1} << 48;
constexpr std::array<std::byte, 1 << 14> kZeros{};

}  // namespace

void Mesh::Queue::push(Part& part) {
  part.next = nullptr;
  (last ? last->next : first) = &part;
  last = &part;
}

Mesh::Part* Mesh::Queue::pop() {
  Part* part = first;
  first = part->next;
  if (!first) last = nullptr;
  return part;
}

Mesh::Mesh(std::vector<Fd> connections) : channels_(connections.size()), scrap_(kAhead) {
  for (std::size_t p = 0; p < connections.size(); ++p) {
    channels_[p].fd = std::move(connections[p]);
    channels_[p].peer = static_cast<int>(p);
    if (channels_[p].fd) channels_[p].buffer.resize(kAhead);
  }
  polled_.reserve(channels_.size());
}

Mesh::Group& Mesh::group_of(std::uint32_t number) {
  Group& group = groups_[number];
  if (group.asked.empty()) {
    group.asked.resize(channels_.size());
    group.early.resize(channels_.size());
  }
  return group;
}

void Mesh::open(std::uint32_t number) {
  group_of(number).is_open = true;
  next_group_ = std::max(next_group_, number + 1);
  // Numbers ascend, so early messages for a skipped number are for nobody.
  for (auto group = groups_.begin(); group->first < number;) {
    const auto [left_out, is_used] = std::pair(group->first, group->second.is_open);
    ++group;
    if (!is_used) cancel(left_out);
  }
}

void Mesh::cancel(std::uint32_t number) noexcept {
  const auto found = groups_.find(number);
  if (found == groups_.end()) return;
  for (Channel& channel : channels_) {
    if (channel.sending && channel.sending->header.group == number) {
      channel.sending = nullptr;
      channel.out = nullptr;
    }
    if (channel.receiving && channel.receiving->header.group == number) {
      channel.receiving = nullptr;
      channel.in = nullptr;
      --channel.asked;
    }
    if (channel.early) {
      for (Early& early : found->second.early[channel.peer])
        if (&early == channel.early) channel.early = nullptr;
      if (!channel.early) channel.in = nullptr;
    }
    Queue others;
    while (channel.sends.first) {
      Part* part = channel.sends.pop();
      if (part->header.group != number) others.push(*part);
    }
    channel.sends = others;
    for (Queue& asked = found->second.asked[channel.peer]; asked.first; asked.pop())
      --channel.asked;
  }
  groups_.erase(found);
}

void Mesh::finish(Part& part) {
  part.is_done = true;
  --*part.left;
}

/// Whether this message is the one for `part`. Where it is not, `part` is done.
bool Mesh::accept(Channel& channel, Part& part, const Header& header) {
  if (header.bytes == part.header.bytes && header.collective == part.header.collective) {
    part.header.digest = header.digest;
    return true;
  }
  part.is_wrong = true;
  part.header = header;
  --channel.asked;
  finish(part);
  return false;
}

void Mesh::post(Part& part) {
  Channel& channel = channels_[part.peer];
  part.header.magic = kMagic;
  part.is_done = part.is_wrong = false;
  if (!part.receives) return channel.sends.push(part);
  Group& group = groups_.find(part.header.group)->second;
  ++channel.asked;
  std::list<Early>& early = group.early[part.peer];
  if (early.empty()) return group.asked[part.peer].push(part);

  Early& message = early.front();
  const bool accepted = accept(channel, part, message.header);
  const std::size_t left = message.is_whole ? 0 : channel.in_left;
  if (accepted && part.header.bytes > left)
    std::memcpy(part.to, message.bytes.get(), part.header.bytes - left);
  if (message.is_whole && accepted) {
    --channel.asked;
    finish(part);
  }
  if (!message.is_whole) {  // the rest is still to come
    channel.early = nullptr;
    channel.receiving = accepted ? &part : nullptr;
    channel.in = accepted ? part.to + (part.header.bytes - left) : nullptr;
  }
  early.pop_front();
}

bool Mesh::progress() {
  bool moved = false;
  for (Channel& channel : channels_) {
    if (channel.wants_to_write()) moved |= write(channel);
    if (channel.wants_to_read()) moved |= read(channel);
  }
  return moved;
}

void Mesh::wait(milliseconds limit) noexcept {
  polled_.clear();
  for (const Channel& channel : channels_) {
    const int events =
        (channel.wants_to_read() ? POLLIN : 0) | (channel.wants_to_write() ? POLLOUT : 0);
    if (events) polled_.push_back({channel.fd.get(), static_cast<short>(events), 0});
  }
  ::poll(polled_.data(), polled_.size(), static_cast<int>(limit.count()));
}

const char* Mesh::trouble(const Part& part) const {
  if (part.is_done) return nullptr;
  const Channel& channel = channels_[part.peer];
  return part.receives ? channel.read_end : channel.write_end;
}

void Mesh::begin_send(Channel& channel) {
  Part* part = channel.sends.pop();
  channel.sending = part;
  channel.out_header = part->header;
  channel.out_header_left = sizeof(Header);
  channel.out = part->from;
  channel.out_left = part->header.bytes;
}

bool Mesh::write(Channel& channel) {
  bool moved = false;
  for (std::size_t turn = 0; turn < kTurn && channel.wants_to_write();) {
    if (channel.out_header_left == 0 && channel.out_left == 0) begin_send(channel);
    iovec pieces[2];
    std::size_t count = 0;
    if (channel.out_header_left > 0)
      pieces[count++] = {
          reinterpret_cast<std::byte*>(&channel.out_header + 1) - channel.out_header_left,
          channel.out_header_left};
    if (channel.out_left > 0)
      pieces[count++] = channel.out ? iovec{const_cast<std::byte*>(channel.out), channel.out_left}
                                    : iovec{const_cast<std::byte*>(kZeros.data()),
                                            std::min(channel.out_left, kZeros.size())};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(channel.fd.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) channel.write_end = std::strerror(errno);
      break;
    }
    moved = true;
    auto bytes = static_cast<std::size_t>(sent);
    turn += bytes;
    const std::size_t of_header = std::min(bytes, channel.out_header_left);
    channel.out_header_left -= of_header;
    bytes -= of_header;
    channel.out_left -= bytes;
    if (channel.out) channel.out += bytes;
    if (channel.out_header_left > 0 || channel.out_left > 0) continue;
    if (Part* part = std::exchange(channel.sending, nullptr)) finish(*part);
  }
  return moved;
}

bool Mesh::read(Channel& channel) {
  bool moved = false;
  for (std::size_t turn = 0; turn < kTurn;) {
    moved |= take(channel);
    if (!channel.wants_to_read()) break;
    // The rest of a message goes to its memory, and what follows it into the buffer, where at most
    // a part of a header is left.
    std::copy(channel.buffer.begin() + static_cast<std::ptrdiff_t>(channel.begin),
              channel.buffer.begin() + static_cast<std::ptrdiff_t>(channel.end),
              channel.buffer.begin());
    channel.end -= channel.begin;
    channel.begin = 0;
    iovec pieces[2];
    std::size_t count = 0, first = 0;
    if (channel.in_left > 0) {
      first = channel.in ? channel.in_left : std::min(channel.in_left, scrap_.size());
      pieces[count++] = {channel.in ? channel.in : scrap_.data(), first};
    }
    if (first == channel.in_left)
      pieces[count++] = {channel.buffer.data() + channel.end, channel.buffer.size() - channel.end};
    const ssize_t got = ::readv(channel.fd.get(), pieces, static_cast<int>(count));
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      if (got == 0)
        channel.read_end = "it closed the connection";
      else if (errno != EAGAIN && errno != EWOULDBLOCK)
        channel.read_end = std::strerror(errno);
      break;
    }
    moved = true;
    auto bytes = static_cast<std::size_t>(got);
    turn += bytes;
    const std::size_t of_message = std::min(bytes, first);
    channel.in_left -= of_message;
    if (channel.in) channel.in += of_message;
    channel.end += bytes - of_message;
    if (channel.in_message && channel.in_left == 0) end_message(channel);
  }
  return moved;
}

/// Goes through what was read ahead while receives are posted. True: there was something.
bool Mesh::take(Channel& channel) {
  bool moved = false;
  while (channel.wants_to_read()) {
    const std::size_t held = channel.end - channel.begin;
    if (!channel.in_message) {
      Header header;
      if (held < sizeof header) break;
      std::memcpy(&header, channel.buffer.data() + channel.begin, sizeof header);
      channel.begin += sizeof header;
      if (header.magic != kMagic || header.bytes > kMost) {
        channel.read_end = "it sends bytes that are not a message of longspan";
        break;
      }
      begin_message(channel, header);
    } else {
      const std::size_t bytes = std::min(held, channel.in_left);
      if (bytes == 0) break;
      if (channel.in) {
        std::memcpy(channel.in, channel.buffer.data() + channel.begin, bytes);
        channel.in += bytes;
      }
      channel.begin += bytes;
      channel.in_left -= bytes;
    }
    moved = true;
    if (channel.in_left == 0) end_message(channel);
  }
  return moved;
}

void Mesh::begin_message(Channel& channel, const Header& header) noexcept try {
  channel.in_message = true;
  channel.in_left = header.bytes;
  channel.in = nullptr;
  const auto found = groups_.find(header.group);
  if (found == groups_.end() && header.group < next_group_) return;  // of a group that has ended
  Group& group = found == groups_.end() ? group_of(header.group) : found->second;
  if (Queue& asked = group.asked[channel.peer]; asked.first) {
    Part& part = *asked.pop();
    if (!accept(channel, part, header)) return;
    channel.receiving = &part;
    channel.in = part.to;
    return;
  }
  std::list<Early>& early = group.early[channel.peer];
  early.push_back({header, std::make_unique_for_overwrite<std::byte[]>(header.bytes)});
  channel.early = &early.back();
  channel.in = early.back().bytes.get();
} catch (const std::bad_alloc&) {
  channel.read_end = "there was no memory for a message that came early";
}

void Mesh::end_message(Channel& channel) {
  channel.in_message = false;
  if (Part* part = std::exchange(channel.receiving, nullptr)) {
    --channel.asked;
    finish(*part);
  }
  if (Early* early = std::exchange(channel.early, nullptr)) early->is_whole = true;
}

}  // namespace longspan::comm
