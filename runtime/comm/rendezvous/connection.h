// Messages between ranks before and beside their collectives: framed, versioned, and not trusted
// until the other side has shown that it is a rank.
//
//   | magic u32 | version u16 | type u16 | payload bytes u32 | payload |   numbers little-endian
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/packer.h"
#include "ebb/runtime/comm/rendezvous/socket.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

inline constexpr uint16_t kProtocolVersion = 6;

enum class MessageType : uint16_t {
  kHello = 1,           // a rank introduces itself
  kWelcome,             // rank 0 has heard it
  kTable,               // all ranks are there; a list of them
  kRefusal,             // the rendezvous has failed, and why
  kBlob,                // one rank's part of an all-gather
  kBlobs,               // all ranks' parts
  kGoodbye,             // the sender leaves in order
  kLeaves,              // the sender leaves in order and still receives, and rank 0 passes on
  kLeavesCommunicator,  // to all ranks: the sender has left a communicator
  kCalls,               // to all ranks: the sender's calls (CallOrder)
  kProbe,               // of rank 0 to itself: the meeting place leads to it
};

struct Message {
  MessageType type = MessageType::kGoodbye;
  std::string payload;
  uint16_t version = kProtocolVersion;  // of the other side; differs from ours in a kHello only
};

class Connection {
 public:
  static constexpr uint32_t kPayloadBytesMaxOfStranger = 4096;
  static constexpr uint32_t kPayloadBytesMax = 64u << 20;

  Connection() = default;
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  bool is_open() const { return socket_.is_open(); }
  void Close() { socket_ = Descriptor(); }
  // Accepts long messages from now on.
  void Trust() { payload_bytes_max_ = kPayloadBytesMax; }

  absl::Status Send(MessageType type, std::string_view payload, WaitPoint::Deadline deadline);
  // kUnavailable: the other side has closed. kAborted: its host cannot be reached any more.
  // kDeadlineExceeded. kDataLoss: the other side does not
  // speak this protocol. kFailedPrecondition: it speaks another version, and the message is no
  // hello.
  absl::StatusOr<Message> Receive(WaitPoint::Deadline deadline);
  // Receives bytes that have arrived; nothing if they are no whole message yet.
  absl::StatusOr<std::optional<Message>> TryReceive();

 private:
  absl::StatusOr<std::optional<Message>> Parse();

  Descriptor socket_;
  std::string received_;
  uint32_t payload_bytes_max_ = kPayloadBytesMaxOfStranger;
};

}  // namespace ebb
