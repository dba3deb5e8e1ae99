#include "ops/cpu/matmul.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "ops/no_memory.h"
#include "status_macros.h"

namespace ebb::gpt::cpu {
namespace {

// Blocks of a few MiB: large enough for GEMM speed, small enough to stay in the caches between
// widening and product.
constexpr int64_t kRowsMax = 512, kColumnsMax = 512, kDepthMax = 1536;
// A thread's rows are multiples of a kernel's tile.
constexpr int64_t kRowGrain = 16;
// A weight's gradient in bf16 is summed in fp32 scratch of oneDNN, as large as the part that is
// computed at once.
constexpr int64_t kSumsMax = int64_t{1} << 18;

const dnnl::engine& CpuEngine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// The state of each multiplying thread. oneDNN's own scratchpad belongs to the thread that made a
// primitive, so a primitive that several threads run needs the caller's scratch. One block of an
// operand is packed in the scratch, which grows to the largest shape's need.
struct ThreadState {
  ThreadState() { omp_set_num_threads(1); }
  void* Scratch(size_t bytes) {
    constexpr size_t kAlignment = 64;
    if (scratch.size() < bytes + kAlignment) scratch.resize(bytes + kAlignment);
    void* at = scratch.data();
    size_t space = scratch.size();
    return std::align(kAlignment, bytes, at, space);
  }
  dnnl::stream stream{CpuEngine()};
  std::vector<std::byte> scratch;
};
ThreadState& ThisThread() {
  static thread_local ThreadState state;
  return state;
}

dnnl::memory::data_type TypeOf(DType dtype) {
  return dtype == DType::kBFloat16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

struct Descriptors {
  explicit Descriptors(const GemmShape& s)
      : a({s.m, s.k}, TypeOf(s.inputs), Strides(s.a_stride, s.a_transposed)),
        b({s.k, s.n}, TypeOf(s.inputs), Strides(s.b_stride, s.b_transposed)),
        c({s.m, s.n}, TypeOf(s.output), Strides(s.c_stride, false)) {
    if (s.bias) bias = dnnl::memory::desc({1, s.n}, TypeOf(s.inputs), Strides(s.n, false));
  }
  static dnnl::memory::dims Strides(int64_t stride, bool transposed) {
    return transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  }
  dnnl::memory::desc a, b, c, bias;
};

dnnl::matmul::primitive_desc Describe(const GemmShape& shape, const Descriptors& d) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  constexpr bool kMayBeEmpty = true;  // no exception if the CPU lacks the type
#if DNNL_VERSION_MAJOR >= 3
  return {CpuEngine(), d.a, d.b, d.bias, d.c, attributes, kMayBeEmpty};
#else
  return {{d.a, d.b, d.bias, d.c}, attributes, CpuEngine(), kMayBeEmpty};
#endif
}

struct Product {
  explicit Product(const GemmShape& shape) : Product(Descriptors(shape), shape) {}
  Product(const Descriptors& d, const GemmShape& shape) : Product(d, Describe(shape, d)) {}
  Product(const Descriptors& d, const dnnl::matmul::primitive_desc& description)
      : descriptors(d), scratchpad(description.scratchpad_desc()), primitive(description) {}
  Descriptors descriptors;
  dnnl::memory::desc scratchpad;
  dnnl::matmul primitive;
};

// oneDNN 2.7 crashes if it lacks memory for a primitive's machine code. So a primitive is made only
// if far more memory is available, and by one thread at a time.
std::shared_ptr<const Product> Make(const GemmShape& shape) {
  ThisThread();  // oneDNN must not start OpenMP threads
  constexpr size_t kRoom = size_t{32} << 20;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  void* const room =
      mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) throw std::bad_alloc();
  munmap(room, kRoom);
  return std::make_shared<const Product>(shape);
}

}  // namespace

// A step has a few dozen shapes, more with long sequences, which are prepared. Sampling has new
// shapes for every length, and a primitive takes some tens of KiB: when there are too many of these
// all are dropped.
struct Gemm::Cache {
  static constexpr size_t kPreparedMax = 4096, kProductsMax = 128;
  mutable std::mutex mutex;
  std::map<GemmShape, std::shared_ptr<const Product>> prepared, products;
  size_t scratch_bytes = 0;  // of the prepared products, at most
  int64_t unprepared = 0;
  absl::Status status;
  std::atomic<bool> failed{false};

  std::shared_ptr<const Product> Find(const GemmShape& shape) {
    const std::lock_guard lock(mutex);
    for (const auto* known : {&prepared, &products}) {
      const auto found = known->find(shape);
      if (found != known->end()) return found->second;
    }
    ++unprepared;
    if (products.size() == kProductsMax) products.clear();
    return products.emplace(shape, Make(shape)).first->second;
  }

  void Prepare(const GemmShape& shape) {
    const std::lock_guard lock(mutex);
    if (prepared.size() == kPreparedMax || prepared.contains(shape)) return;
    std::shared_ptr<const Product> product = Make(shape);
    scratch_bytes = std::max(scratch_bytes, product->scratchpad.get_size());
    prepared.emplace(shape, std::move(product));
  }
};

namespace {

// The error of a function of oneDNN's, or of memory for it.
absl::Status Try(const GemmShape* shape, absl::FunctionRef<void()> work) {
  const auto what = [&] {
    return shape == nullptr ? std::string("scratch for matrix products")
                            : absl::StrCat("a matrix product of [", shape->m, ", ", shape->k,
                                           "] and [", shape->k, ", ", shape->n, "]");
  };
  try {
    work();
  } catch (const std::bad_alloc&) {
    return NoMemoryFor(what());
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory) return NoMemoryFor(what());
    return absl::InternalError(absl::StrCat(what(), ": oneDNN: ", error.what()));
  }
  return absl::OkStatus();
}

}  // namespace

Gemm::Gemm() : cache_(std::make_unique<Cache>()) {}
Gemm::~Gemm() = default;

absl::Status Gemm::Prepare(const GemmShape& shape) {
  return Try(&shape, [&] { cache_->Prepare(shape); });
}

absl::Status Gemm::PrepareThread() {
  return Try(nullptr, [&] { ThisThread().Scratch(cache_->scratch_bytes); });
}

int64_t Gemm::unprepared() const {
  const std::lock_guard lock(cache_->mutex);
  return cache_->unprepared;
}

absl::Status Gemm::status() const {
  const std::lock_guard lock(cache_->mutex);
  return cache_->status;
}

void Gemm::Run(const GemmShape& shape, const void* a, const void* b, const void* bias, void* c) {
  if (cache_->failed.load(std::memory_order_relaxed)) return;
  const absl::Status run = Try(&shape, [&] {
    ThreadState& thread = ThisThread();
    const std::shared_ptr<const Product> product = cache_->Find(shape);
    const Descriptors& d = product->descriptors;
    const auto memory = [](const dnnl::memory::desc& desc, const void* data) {
      return dnnl::memory(desc, CpuEngine(), const_cast<void*>(data));
    };
    std::unordered_map<int, dnnl::memory> arguments = {{DNNL_ARG_SRC, memory(d.a, a)},
                                                       {DNNL_ARG_WEIGHTS, memory(d.b, b)},
                                                       {DNNL_ARG_DST, memory(d.c, c)}};
    if (shape.bias) arguments.emplace(DNNL_ARG_BIAS, memory(d.bias, bias));
    if (const size_t bytes = product->scratchpad.get_size(); bytes > 0)
      arguments.emplace(DNNL_ARG_SCRATCHPAD, memory(product->scratchpad, thread.Scratch(bytes)));
    product->primitive.execute(thread.stream, arguments);
  });
  if (run.ok()) return;
  const std::lock_guard lock(cache_->mutex);
  if (!cache_->failed.exchange(true)) cache_->status = run;
}

bool Gemm::HasNative(DType dtype) {
  if (dtype == DType::kFloat32) return true;
  if (dtype != DType::kBFloat16) return false;
  // On a CPU with AVX-512 but without BF16, oneDNN emulates bf16, which is slower than fp32.
  constexpr int kBf16 = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<int>(dnnl::get_effective_cpu_isa()) & kBf16) == kBf16;
}

Matmul::Matmul(DType compute, Gemm& gemm, ThreadTeam& team, std::span<float> scratch)
    : compute_(compute),
      multiplied_(Gemm::HasNative(compute) ? compute : DType::kFloat32),
      gemm_(gemm),
      team_(team),
      c_scratch_(scratch.data()) {
  a_scratch_ = c_scratch_ + kRowsMax * kColumnsMax;
  b_scratch_ = a_scratch_ + kRowsMax * kDepthMax;
}

int64_t Matmul::ScratchFloats(DType compute) {
  const int64_t c = kRowsMax * kColumnsMax;
  return Gemm::HasNative(compute) ? c : c + kRowsMax * kDepthMax + kDepthMax * kColumnsMax;
}

bool Matmul::IsDirect(const MatmulArrays& arrays) const {
  const bool writes_target = arrays.c.dtype == DType::kFloat32 || arrays.c.dtype == multiplied_;
  const bool adds_bias = arrays.bias == nullptr || compute_ == multiplied_;
  return compute_ == multiplied_ && writes_target && adds_bias;
}

void Matmul::Run(const MatmulArrays& arrays) {
  if (IsDirect(arrays)) return RunDirect(arrays);
  RunBlocked(arrays);
}

absl::Status Matmul::Prepare(const MatmulArrays& x) {
  if (IsDirect(x)) return PrepareGemm(DirectShape(x));
  // Whole blocks along each extent, and the rest at its end.
  for (const int64_t rows : {std::min(kRowsMax, x.m), x.m % kRowsMax}) {
    for (const int64_t columns : {std::min(kColumnsMax, x.n), x.n % kColumnsMax}) {
      for (const int64_t depth : {std::min(kDepthMax, x.k), x.k % kDepthMax}) {
        for (const bool accumulate : {false, true}) {
          const bool comes = accumulate ? x.k > kDepthMax : depth == std::min(kDepthMax, x.k);
          if (rows == 0 || columns == 0 || depth == 0 || !comes) continue;
          GPT_RETURN_IF_ERROR(PrepareGemm(BlockShape(x, rows, columns, depth, accumulate)));
        }
      }
    }
  }
  return absl::OkStatus();
}

GemmShape Matmul::DirectShape(const MatmulArrays& x) const {
  return {.m = x.m,
          .n = x.n,
          .k = x.k,
          .a_stride = x.a_transposed ? x.m : x.k,
          .b_stride = x.b_transposed ? x.k : x.n,
          .c_stride = x.n,
          .a_transposed = x.a_transposed,
          .b_transposed = x.b_transposed,
          .bias = x.bias != nullptr,
          .accumulate = x.c.beta != 0,
          .inputs = compute_,
          .output = x.c.dtype};
}

GemmShape Matmul::BlockShape(const MatmulArrays& x, int64_t rows, int64_t columns, int64_t depth,
                             bool accumulate) const {
  const bool widens = compute_ != multiplied_;
  const int64_t a_stride = x.a_transposed ? x.m : x.k, b_stride = x.b_transposed ? x.k : x.n;
  return {.m = rows,
          .n = columns,
          .k = depth,
          .a_stride = !widens          ? a_stride
                      : x.a_transposed ? rows
                                       : depth,
          .b_stride = !widens          ? b_stride
                      : x.b_transposed ? depth
                                       : columns,
          .c_stride = columns,
          .a_transposed = x.a_transposed,
          .b_transposed = x.b_transposed,
          .accumulate = accumulate,
          .inputs = multiplied_};
}

void Matmul::RunDirect(const MatmulArrays& x) {
  RunGemm(DirectShape(x), x.a, x.b, x.bias, x.c.data);
}

int64_t Matmul::PartOf(const GemmShape& whole) const {
  const int64_t per_thread = (whole.m + team_.threads() - 1) / team_.threads();
  const bool has_sums = whole.a_transposed && whole.output != DType::kFloat32;
  const int64_t rows = has_sums ? std::min(per_thread, kSumsMax / whole.n) : per_thread;
  return std::max((rows + kRowGrain - 1) / kRowGrain, int64_t{1}) * kRowGrain;
}

absl::Status Matmul::PrepareGemm(GemmShape whole) {
  const int64_t part = PartOf(whole), last = whole.m % part;
  for (const int64_t rows : {std::min(part, whole.m), last}) {
    if (rows == 0) continue;
    whole.m = rows;
    GPT_RETURN_IF_ERROR(gemm_.Prepare(whole));
  }
  return absl::OkStatus();
}

void Matmul::RunGemm(const GemmShape& whole, const void* a, const void* b, const void* bias,
                     void* c) {
  const int64_t part = PartOf(whole);
  team_.Run((whole.m + part - 1) / part, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t row = p * part;
      GemmShape shape = whole;
      shape.m = std::min(part, whole.m - row);
      gemm_.Run(shape, At(a, whole.inputs, whole.a_transposed ? row : row * whole.a_stride), b,
                bias, At(c, whole.output, row * whole.c_stride));
    }
  });
}

Block Matmul::Widened(const void* matrix, int64_t stride, int64_t row, int64_t column, int64_t rows,
                      int64_t columns, float* scratch) {
  const Block block = {At(matrix, compute_, row * stride + column), stride};
  if (compute_ == multiplied_) return block;
  team_.Run(rows, 8, [&](int64_t begin, int64_t end) {
    Widen(compute_, {At(block.data, compute_, begin * stride), stride}, end - begin, columns,
          scratch + begin * columns);
  });
  return {scratch, columns};
}

void Matmul::RunBlocked(const MatmulArrays& x) {
  const int64_t a_stride = x.a_transposed ? x.m : x.k, b_stride = x.b_transposed ? x.k : x.n;
  for (int64_t m = 0; m < x.m; m += kRowsMax) {
    const int64_t rows = std::min(kRowsMax, x.m - m);
    Block a;
    int64_t a_depth =
        -1;  // where the block in `a` begins; it serves all columns if one block spans the depth
    for (int64_t n = 0; n < x.n; n += kColumnsMax) {
      const int64_t columns = std::min(kColumnsMax, x.n - n);
      for (int64_t k = 0; k < x.k; k += kDepthMax) {
        const int64_t depth = std::min(kDepthMax, x.k - k);
        if (a_depth != k) {
          a = x.a_transposed ? Widened(x.a, a_stride, k, m, depth, rows, a_scratch_)
                             : Widened(x.a, a_stride, m, k, rows, depth, a_scratch_);
          a_depth = k;
        }
        const Block b = x.b_transposed ? Widened(x.b, b_stride, n, k, columns, depth, b_scratch_)
                                       : Widened(x.b, b_stride, k, n, depth, columns, b_scratch_);
        RunGemm(BlockShape(x, rows, columns, depth, /*accumulate=*/k > 0), a.data, b.data, nullptr,
                c_scratch_);
      }
      team_.Run(rows, 8, [&](int64_t begin, int64_t end) {
        Store({.source = c_scratch_ + begin * columns,
               .bias = x.bias == nullptr ? nullptr : At(x.bias, compute_, n),
               .bias_dtype = compute_,
               .target = {At(x.c.data, x.c.dtype, (m + begin) * x.n + n), x.c.dtype, x.c.beta},
               .target_stride = x.n},
              end - begin, columns);
      });
    }
  }
}

}  // namespace ebb::gpt::cpu
