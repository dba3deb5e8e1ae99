#include "ops/cpu/gemm.h"

#include <omp.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"

namespace ebb::gpt::cpu {
namespace {

const dnnl::engine& CpuEngine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// What a thread that multiplies has for itself. oneDNN's own scratchpad belongs to the thread that
// made a primitive, so a primitive run by several threads needs scratch handed in; it packs one
// block of an operand, and grows to the largest shape's.
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
  constexpr bool kMayBeEmpty = true;  // instead of an exception where the CPU lacks the type
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

}  // namespace

// A step's shapes are a few dozen. Sampling has new ones for every length, and a primitive is some
// tens of KiB: when there are too many all go, and those in use are made again.
struct Gemm::Cache {
  static constexpr size_t kProductsMax = 128;
  std::mutex mutex;
  std::map<GemmShape, std::shared_ptr<const Product>> products;

  std::shared_ptr<const Product> Find(const GemmShape& shape) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = products.find(shape);
    if (found != products.end()) return found->second;
    if (products.size() == kProductsMax) products.clear();
    return products.emplace(shape, std::make_shared<const Product>(shape)).first->second;
  }
};

Gemm::Gemm() : cache_(std::make_unique<Cache>()) {}
Gemm::~Gemm() = default;

void Gemm::Run(const GemmShape& shape, const void* a, const void* b, const void* bias, void* c) {
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
  if (const size_t bytes = product->scratchpad.get_size(); bytes > 0) {
    arguments.emplace(DNNL_ARG_SCRATCHPAD, memory(product->scratchpad, thread.Scratch(bytes)));
  }
  product->primitive.execute(thread.stream, arguments);
}

bool Gemm::HasNative(DType dtype) {
  if (dtype == DType::kFloat32) return true;
  if (dtype != DType::kBFloat16) return false;
  // Where only AVX-512 without BF16 is there, oneDNN emulates bf16, slower than fp32.
  constexpr int kBf16 = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
  return (static_cast<int>(dnnl::get_effective_cpu_isa()) & kBf16) == kBf16;
}

}  // namespace ebb::gpt::cpu
