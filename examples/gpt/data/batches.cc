#include "data/batches.h"

#include "ebb/runtime/device/awaited_event.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr int64_t kAlignment = 64;

// The bytes of one micro-batch: tokens, then targets.
int64_t BytesOf(int64_t rows) {
  return 2 * ((rows * int64_t{sizeof(int32_t)} + kAlignment - 1) / kAlignment * kAlignment);
}

int32_t* ArrayAt(std::byte* memory, size_t index, int64_t rows, int which) {
  return reinterpret_cast<int32_t*>(memory + static_cast<int64_t>(index) * BytesOf(rows) +
                                    which * BytesOf(rows) / 2);
}

}  // namespace

int64_t Batches::DeviceBytes(int64_t count, int64_t rows) {
  return count * BytesOf(rows);
}

absl::StatusOr<Batches> Batches::Create(const Device& device, int64_t count, int64_t rows,
                                        std::span<std::byte> memory) {
  Batches batches(device, rows, memory);
  GPT_ASSIGN_OR_RETURN(batches.host_,
                       device.AllocateShared(DeviceBytes(2 * count, rows), "two steps' tokens"));
  for (int64_t i = 0; i < 2 * count; ++i) {
    GPT_ASSIGN_OR_RETURN(Event event, NewAwaitedEvent(device));
    batches.copied_.push_back(std::move(event));
  }
  batches.parity_.resize(static_cast<size_t>(count));
  batches.batches_.resize(static_cast<size_t>(count));
  return batches;
}

Batches::HostArrays Batches::Fill(int64_t index) {
  parity_[index] ^= 1;
  const size_t slot = SlotOf(index);
  copied_[slot].Wait();
  const auto rows = static_cast<size_t>(rows_);
  return {{ArrayAt(host_.data(), slot, rows_, 0), rows},
          {ArrayAt(host_.data(), slot, rows_, 1), rows}};
}

const Batch& Batches::Load(int64_t index, int64_t sequences, int64_t length) {
  const int64_t bytes = sequences * length * int64_t{sizeof(int32_t)};
  const size_t at = static_cast<size_t>(index), slot = SlotOf(index);
  int32_t* arrays[2];
  for (int which : {0, 1}) {
    arrays[which] = ArrayAt(memory_.data(), at, rows_, which);
    stream_.Copy(arrays[which], ArrayAt(host_.data(), slot, rows_, which), bytes);
  }
  stream_.Record(copied_[slot]);
  Batch& loaded = batches_[at];
  loaded = {.tokens = arrays[0], .targets = arrays[1], .sequences = sequences, .length = length};
  return loaded;
}

}  // namespace ebb::gpt
