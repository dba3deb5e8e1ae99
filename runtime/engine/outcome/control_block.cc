#include "ebb/runtime/engine/outcome/control_block.h"

#include <algorithm>
#include <memory>
#include <string_view>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/sharding/operands.h"

namespace ebb {
namespace {

// Places of arrays, one behind the other, in memory that begins at a page.
class Cutter {
 public:
  template <class T>
  size_t Take(size_t count) {
    constexpr size_t kAlignment = 64;
    static_assert(alignof(T) <= kAlignment);
    const size_t at = (end_ + kAlignment - 1) / kAlignment * kAlignment;
    end_ = at + count * sizeof(T);
    return at;
  }
  int64_t bytes() const { return static_cast<int64_t>(end_); }

 private:
  size_t end_ = 0;
};

template <class T>
std::span<T> Construct(std::byte* at, size_t count) {
  T* const begin = reinterpret_cast<T*>(at);
  std::uninitialized_value_construct_n(begin, count);
  return {begin, count};
}

}  // namespace

absl::Status ControlBlock::Create(const Device& device, const Sizes& sizes,
                                  std::span<const optim::UpdateRun> runs,
                                  std::optional<ControlBlock>& into) {
  constexpr std::string_view kWhat = "what host and device tell each other";
  ControlBlock& block = into.emplace();
  block.ranks_ = sizes.ranks;
  block.compared_ = sizes.compared;
  const size_t record_bytes = kSlots * (sizes.ranks + 1) * block.RecordBytes(),
               constants_in_all = 4 * sizes.sets,
               norm_bytes = sizes.norm_records * sizes.norm_record;
  Cutter cutter;
  const size_t squares = cutter.Take<double>(sizes.units),
               sums = cutter.Take<double>(kSlots * Evaluation::kSums),
               loss_scale = cutter.Take<float>(1), records = cutter.Take<std::byte>(record_bytes),
               constants = cutter.Take<optim::UpdateConstants>(constants_in_all),
               norm_sums = cutter.Take<optim::NormSums>(sizes.norm_sums),
               norm_record = cutter.Take<std::byte>(sizes.norm_record),
               norm_records = cutter.Take<std::byte>(norm_bytes),
               table = cutter.Take<optim::UpdateRun>(runs.size());
  EBB_ASSIGN_OR_RETURN(block.memory_, device.AllocateShared(cutter.bytes(), kWhat));
  std::byte* const memory = block.memory_.data();
  block.squares_ = Construct<double>(memory + squares, sizes.units);
  block.sums_ = Construct<double>(memory + sums, kSlots * Evaluation::kSums);
  block.loss_scale_ = Construct<float>(memory + loss_scale, 1).data();
  block.records_ = {memory + records, record_bytes};
  std::fill_n(block.records_.data(), record_bytes, std::byte());
  for (int parity = 0; parity < kSlots; ++parity) {
    std::fill_n(block.records(parity).data(), sizes.ranks, ExchangeRecord());
    block.own_record(parity) = {};
  }
  block.device_constants_ = block.constants_ =
      Construct<optim::UpdateConstants>(memory + constants, constants_in_all);
  block.norm_sums_ = Construct<optim::NormSums>(memory + norm_sums, sizes.norm_sums);
  block.norm_record_ = Construct<std::byte>(memory + norm_record, sizes.norm_record);
  block.norm_records_ = Construct<std::byte>(memory + norm_records, norm_bytes);
  block.device_runs_ = block.runs_ = Construct<optim::UpdateRun>(memory + table, runs.size());
  std::copy(runs.begin(), runs.end(), block.runs_.begin());
  *block.loss_scale_ = 1;
  if (HostReaches(device)) return absl::OkStatus();

  Cutter on_device;
  const size_t device_constants = on_device.Take<optim::UpdateConstants>(constants_in_all),
               device_runs = on_device.Take<optim::UpdateRun>(runs.size());
  EBB_ASSIGN_OR_RETURN(block.device_memory_,
                       device.Allocate(std::max<int64_t>(on_device.bytes(), 1), kWhat));
  // Not for the host to touch, and all zero: no update.
  std::byte* const there = block.device_memory_.data();
  block.device_constants_ = {reinterpret_cast<optim::UpdateConstants*>(there + device_constants),
                             constants_in_all};
  block.device_runs_ = {reinterpret_cast<optim::UpdateRun*>(there + device_runs), runs.size()};
  return absl::OkStatus();
}

std::span<std::byte> ControlBlock::At(int64_t cell, int parity) const {
  const auto bytes = [](auto span) { return std::as_writable_bytes(span); };
  const sharding::ControlCells cells(static_cast<int>(squares_.size()));
  if (cell < std::ssize(squares_)) return bytes(std::span(&square(static_cast<int>(cell)), 1));
  if (cell == cells.scale) return bytes(std::span(loss_scale_, 1));
  if (cell == cells.sums() || cell == cells.walk_sums()) return bytes(sums(parity));
  if (cell == cells.constants()) return bytes(constants(parity, /*early=*/false));
  if (cell == cells.early()) return bytes(constants(parity, /*early=*/true));
  if (cell == cells.device_constants()) return bytes(Of(parity, false, device_constants_));
  if (cell == cells.device_early()) return bytes(Of(parity, true, device_constants_));
  if (cell == cells.record() || cell == cells.walk_record()) return OwnRecord(parity);
  if (cell == cells.records() || cell == cells.walk_records()) return Records(parity);
  if (cell == cells.norm_sums()) return bytes(norm_sums_);
  if (cell == cells.norm_record()) return norm_record_;
  if (cell == cells.norm_records()) return norm_records_;
  return {};
}

void ControlBlock::CopyRuns(Stream& stream) const {
  if (device_runs_.data() != runs_.data())
    stream.Copy(device_runs_.data(), runs_.data(), static_cast<int64_t>(runs_.size_bytes()));
}

}  // namespace ebb
