#include "ebb/runtime/engine/control_block.h"

#include <memory>

#include "ebb/runtime/config/status_macros.h"

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

absl::StatusOr<ControlBlock> ControlBlock::Create(const Device& device, size_t units, size_t ranks,
                                                  size_t updates) {
  Cutter cutter;
  const size_t squares = cutter.Take<double>(units), losses = cutter.Take<double>(2),
               loss_scale = cutter.Take<float>(1),
               records = cutter.Take<ExchangeRecord>(2 * (ranks + 1)),
               constants = cutter.Take<optim::UpdateConstants>(4 * updates);
  ControlBlock block;
  EBB_ASSIGN_OR_RETURN(
      block.memory_, device.AllocateShared(cutter.bytes(), "what host and device tell each other"));
  std::byte* const memory = block.memory_.data();
  block.squares_ = Construct<double>(memory + squares, units);
  block.losses_ = Construct<double>(memory + losses, 2);
  block.loss_scale_ = Construct<float>(memory + loss_scale, 1).data();
  block.records_ = Construct<ExchangeRecord>(memory + records, 2 * (ranks + 1));
  block.constants_ = Construct<optim::UpdateConstants>(memory + constants, 4 * updates);
  *block.loss_scale_ = 1;
  return block;
}

}  // namespace ebb
