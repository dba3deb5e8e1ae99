#include "ebb/runtime/engine/create/update_rates.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "absl/functional/function_ref.h"
#include "ebb/optim/update_constants.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/device_reach.h"
#include "ebb/sharding/placement.h"

namespace ebb {
namespace {

constexpr int kPasses = 5;  // the fastest counts; one more runs before them
constexpr double kSecondsMax = 0.02;
constexpr int kEnqueued = 8;  // in a pass of the device, so that the host's wait is little of it

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double SecondsOf(absl::FunctionRef<void()> pass) {
  double best = std::numeric_limits<double>::infinity();
  const Clock::time_point start = Clock::now();
  for (int i = -1; i < kPasses && (i < 1 || SecondsSince(start) < kSecondsMax); ++i) {
    const Clock::time_point began = Clock::now();
    pass();
    if (i >= 0) best = std::min(best, SecondsSince(began));
  }
  return std::max(best, 1e-9);
}

// Arrays of `count` elements, one behind the other.
class Layout {
 public:
  Layout(const UpdateShape& shape, int64_t count) : shape_(shape), count_(count) {
    states_ = static_cast<int>(optim::StateNames(shape.optimizer).size());
    if (shape.master == optim::MasterForm::kWhole) master_ = count * 4;
    if (shape.master == optim::MasterForm::kSplit) master_ = count * 2;
    // The sent one, which copies leave there, may be the larger.
    gradient_ = count * std::max(SizeOf(shape.gradient), SizeOf(shape.sent));
  }

  int64_t bytes() const { return ParameterAt() + count_ * SizeOf(shape_.parameter); }
  std::byte* GradientIn(std::byte* memory) const { return memory + GradientAt(); }
  std::byte* ParameterIn(std::byte* memory) const { return memory + ParameterAt(); }
  optim::UpdateArrays ArraysIn(std::byte* memory) const {
    optim::UpdateArrays arrays{.gradient = GradientIn(memory),
                               .gradient_dtype = shape_.gradient,
                               .parameter = ParameterIn(memory),
                               .parameter_dtype = shape_.parameter,
                               .count = count_};
    if (shape_.master == optim::MasterForm::kWhole)
      arrays.master = reinterpret_cast<float*>(memory);
    if (shape_.master == optim::MasterForm::kSplit)
      arrays.master_low = reinterpret_cast<uint16_t*>(memory);
    for (int k = 0; k < states_; ++k)
      arrays.states[k] = reinterpret_cast<float*>(memory + master_) + k * count_;
    return arrays;
  }

 private:
  int64_t GradientAt() const { return master_ + states_ * count_ * 4; }
  int64_t ParameterAt() const { return GradientAt() + gradient_; }

  const UpdateShape& shape_;
  const int64_t count_;
  int states_ = 0;
  int64_t master_ = 0, gradient_ = 0;
};

}  // namespace

absl::StatusOr<sharding::UpdateRates> MeasureUpdateRates(const Device& device,
                                                         optim::Kernels& on_device,
                                                         optim::Kernels& on_host,
                                                         const UpdateShape& shape,
                                                         UpdateScratch& scratch) {
  constexpr std::string_view kWhat = "measuring the rates of updates";
  // Whole cuts, as sub-groups are.
  const int64_t cuts = (std::min(shape.elements, kMeasuredElements) + sharding::kCutElements - 1) /
                       sharding::kCutElements;
  const int64_t count = std::max<int64_t>(1, cuts) * sharding::kCutElements;
  const Layout layout(shape, count);
  constexpr int64_t kConstantsBytes = sizeof(optim::UpdateConstants);
  EBB_ASSIGN_OR_RETURN(scratch.device, device.Allocate(layout.bytes() + kConstantsBytes, kWhat));
  // Allocated like the pools of training: a device with memory of its own locks it, and goes on if
  // it cannot. The pools report that later.
  const bool shares = HostReaches(device);
  EBB_ASSIGN_OR_RETURN(scratch.host,
                       AllocatePinned(layout.bytes(), shape.pins_host_memory && shares, kWhat));
  absl::StatusOr<LockedRange> locked = device.LockHostMemory(scratch.host.buffer.span(), kWhat);
  if (locked.ok()) scratch.locked = *std::move(locked);
  EBB_RETURN_IF_ERROR(device.status());
  EBB_ASSIGN_OR_RETURN(scratch.shared, device.AllocateShared(kConstantsBytes, kWhat));
  auto* const constants = reinterpret_cast<optim::UpdateConstants*>(scratch.shared.data());
  *constants = optim::UpdateConstantsOf(
      shape.optimizer, {.step = 2, .learning_rate = shape.optimizer.learning_rate});
  std::byte* const in_device = scratch.device.data();
  std::byte* const in_host = scratch.host.buffer.data();
  // Streams end before the memory goes.
  EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("ebb measure"));
  EBB_ASSIGN_OR_RETURN(Stream upload, device.NewStream("ebb measure up"));
  EBB_ASSIGN_OR_RETURN(Stream host, device.NewHostStream("ebb measure cpu"));

  std::byte* const device_constants = in_device + layout.bytes();
  stream.Copy(device_constants, constants, kConstantsBytes);
  stream.WaitIdle();
  const optim::UpdateArrays device_arrays = layout.ArraysIn(in_device);
  const double of_device = SecondsOf([&] {
    for (int i = 0; i < kEnqueued; ++i)
      on_device.Update(stream, shape.optimizer, device_arrays,
                       reinterpret_cast<const optim::UpdateConstants*>(device_constants));
    stream.WaitIdle();
  });
  const optim::UpdateArrays host_arrays = layout.ArraysIn(in_host);
  const double of_host = SecondsOf([&] {
    host.Enqueue([&] { on_host.Update(host, shape.optimizer, host_arrays, constants); });
    host.WaitIdle();
  });
  const double of_copies = SecondsOf([&] {
    for (int i = 0; i < kEnqueued; ++i) {
      stream.Copy(layout.GradientIn(in_host), layout.GradientIn(in_device),
                  count * SizeOf(shape.sent));
      if (shape.parameters_go_up) {
        upload.Copy(layout.ParameterIn(in_device), layout.ParameterIn(in_host),
                    count * SizeOf(shape.parameter));
      }
    }
    stream.WaitIdle();
    upload.WaitIdle();
  });
  EBB_RETURN_IF_ERROR(stream.status());
  EBB_RETURN_IF_ERROR(upload.status());
  EBB_RETURN_IF_ERROR(device.status());
  const auto elements = static_cast<double>(count);
  return sharding::UpdateRates{.device = kEnqueued * elements / of_device,
                               .host = elements / of_host,
                               .copies = kEnqueued * elements / of_copies};
}

}  // namespace ebb
