#include "ebb/runtime/comm/packer.h"

namespace ebb {

// In the byte order of all hosts that Ebb runs on.
static_assert(std::endian::native == std::endian::little);

void Packer::AddNumber(uint64_t number) {
  bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void Packer::AddOne(std::string_view text) {
  AddNumber(text.size());
  bytes_.append(text);
}

void Packer::AddOne(const absl::Status& status) {
  Add(status.code(), std::string_view(status.message().data(), status.message().size()));
}

uint64_t Unpacker::Number() {
  uint64_t number = 0;
  ok_ = ok_ && bytes_.size() >= sizeof(number);
  if (!ok_) return 0;
  bytes_.copy(reinterpret_cast<char*>(&number), sizeof(number));
  bytes_.remove_prefix(sizeof(number));
  return number;
}

std::string Unpacker::Text() {
  const uint64_t size = Number();
  ok_ = ok_ && size <= bytes_.size();
  if (!ok_) return "";
  std::string text(bytes_.substr(0, size));
  bytes_.remove_prefix(size);
  return text;
}

void Unpacker::ReadOne(absl::Status& value) {
  const uint64_t code = Number();
  const std::string message = Text();
  ok_ = ok_ && code <= static_cast<uint64_t>(absl::StatusCode::kUnauthenticated);
  value = ok_ ? absl::Status(static_cast<absl::StatusCode>(code), message)
              : absl::DataLossError("a status that cannot be read");
}

std::string PackStatus(const absl::Status& status) {
  return Packer().Add(status).Take();
}

absl::Status UnpackStatus(std::string_view payload) {
  absl::Status status;
  Unpacker(payload).Read(status);
  return status;
}

}  // namespace ebb
