// Newton-Schulz's iteration for Muon: the matrix nearest to having orthogonal rows (or columns),
// approximately. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks":
//
//   X = X / max(|X|, epsilon)               Frobenius
//   repeat `steps` times, with A = X X':    the smaller side's products
//     X = a X + (b A + c A A) X
//   X = scale X
//
// Singular values come near to 1. (Higham 2008, "Functions of Matrices", chapter 8, has the theory.)
// Matrices stay in one dtype; products sum in fp32 and round once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "ebb/optim/matrix_product.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/base/newton_schulz_work.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

struct NewtonSchulz {
  int64_t steps = 5;
  float a = 3.4445f, b = -4.7750f, c = 2.0315f;
  float epsilon = 1e-7f;
  float scale = 1;
};
// The rule that an optimizer's options give a matrix of this shape.
NewtonSchulz NewtonSchulzOf(const OptimizerConfig& muon, int64_t rows, int64_t columns);

// A matrix in row-major memory, replaced by the result. fp32 or bf16.
struct MatrixArrays {
  void* matrix = nullptr;
  int64_t rows = 0, columns = 0;
  DType dtype = DType::kFloat32;
  std::byte* scratch = nullptr;  // of NewtonSchulzScratch, aligned as it says
};

// The iteration's products, in order, by any means. Before them the scaled matrix is in
// IterationStart(), as the sums that scale it are not needed any more.
void Iterate(const NewtonSchulz& rule, const MatrixArrays& arrays,
             absl::FunctionRef<void(const Product&)> multiply);
void* IterationStart(const NewtonSchulz& rule, const MatrixArrays& arrays);

// On the CPU. The bits do not depend on the team.
void Orthogonalise(ThreadTeam& team, const NewtonSchulz& rule, const MatrixArrays& arrays);

}  // namespace ebb::optim
