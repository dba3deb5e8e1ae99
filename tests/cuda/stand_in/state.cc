#include "state.h"

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string_view>
#include <utility>

namespace ebb::stand_in {
namespace {

struct Fault {
  int calls_left = 0;
  int code = 0;
};

std::mutex mutex;
std::map<std::string, Fault, std::less<>> faults;
std::atomic<bool> any_fault{false};
std::atomic<cudaError_t> lost{cudaSuccess};
std::shared_mutex copying;  // copies share it; losing the device takes it alone
std::atomic<bool> offers_products{true};
std::map<std::pair<uint32_t, int>, int64_t> product_ns;  // by epilogue and algorithm
bool loads_products_lazily = false;
std::set<std::array<int64_t, 8>> loaded_products;
std::atomic<bool> hides_stream_wait_value{false}, refuses_locks{false}, has_refused_lock{false};
std::atomic<size_t> free_memory{0};
std::atomic<int> nccl_version{0}, cublaslt_version{0};
std::atomic<int> alive[10];

}  // namespace

void FailCall(const std::string& function, int code, int nth) {
  const std::scoped_lock lock(mutex);
  faults[function] = {.calls_left = nth, .code = code};
  any_fault = true;
}

int Injected(const char* function) {
  if (!any_fault) return 0;
  const std::scoped_lock lock(mutex);
  const auto found = faults.find(std::string_view(function));
  if (found == faults.end() || --found->second.calls_left > 0) return 0;
  const int code = found->second.code;
  faults.erase(found);
  return code;
}

void LoseDevice(cudaError_t error) {
  const std::unique_lock lock(copying);
  lost = error;
}
void CopyUnlessLost(absl::FunctionRef<void()> copy) {
  const std::shared_lock lock(copying);
  if (Lost() == cudaSuccess) copy();
}
cudaError_t Lost() {
  return lost;
}
void HideStreamWaitValue() {
  hides_stream_wait_value = true;
}
bool HidesStreamWaitValue() {
  return hides_stream_wait_value;
}
void RefuseLocks() {
  refuses_locks = true;
}
bool RefusesLocks() {
  return refuses_locks;
}
void NoteRefusedLock() {
  has_refused_lock = true;
}
bool HasRefusedLock() {
  return has_refused_lock;
}

void SetProductTime(uint32_t epilogue, int algorithm, int64_t ns) {
  const std::scoped_lock lock(mutex);
  product_ns[{epilogue, algorithm}] = ns;
}
int64_t ProductTime(uint32_t epilogue, int algorithm) {
  const std::scoped_lock lock(mutex);
  const auto found = product_ns.find({epilogue, algorithm});
  return found == product_ns.end() ? 0 : found->second;
}
void LoadProductsLazily() {
  const std::scoped_lock lock(mutex);
  loads_products_lazily = true;
}
bool LoadsProductNow(const std::array<int64_t, 8>& kernel) {
  const std::scoped_lock lock(mutex);
  return loads_products_lazily && loaded_products.insert(kernel).second;
}
void OfferNoProducts() {
  offers_products = false;
}
bool OffersProducts() {
  return offers_products;
}

void SetFreeMemory(size_t bytes) {
  free_memory = bytes;
}
size_t FreeMemory() {
  return free_memory;
}
int64_t DriverBytes(int device) {
  const auto of = [](Thing thing, int64_t bytes) { return alive[static_cast<int>(thing)] * bytes; };
  return (HasContext(device) ? kContextBytes : 0) + of(Thing::kCommunicator, kCommunicatorBytes) +
         of(Thing::kHandle, kHandleBytes) + of(Thing::kGraph, kGraphBytes);
}

void SetNcclVersion(int version) {
  nccl_version = version;
}
int NcclVersion() {
  return nccl_version;
}
void SetCublasLtVersion(int version) {
  cublaslt_version = version;
}
int CublasLtVersion() {
  return cublaslt_version;
}

void Count(Thing thing, int change) {
  alive[static_cast<int>(thing)] += change;
}
Live Alive() {
  return {.streams = alive[0],
          .events = alive[1],
          .allocations = alive[2],
          .communicators = alive[3],
          .operators = alive[4],
          .locked = alive[5],
          .registrations = alive[6],
          .products = alive[7],
          .graphs = alive[8]};
}

void Reset() {
  const std::scoped_lock lock(mutex);
  faults.clear();
  any_fault = false;
  lost = cudaSuccess;
  hides_stream_wait_value = refuses_locks = has_refused_lock = false;
  offers_products = true;
  product_ns.clear();
  loads_products_lazily = false;
  loaded_products.clear();
  SetLaunchQueue(0);
  free_memory = 0;
  nccl_version = cublaslt_version = 0;
  SetDevices(2);
  ForgetContexts();
  ForgetCallers();
  ForgetNcclFaults();
  ForgetGraphLaunches();
  ForgetHostFunctions();
}

}  // namespace ebb::stand_in
