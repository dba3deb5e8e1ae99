#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/program/program.h"
#include "ebb/runtime/checkpoint/tensor_source.h"

namespace ebb {

absl::StatusOr<int> Diff(const std::string& a_path, const std::string& b_path) {
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> a, OpenAnySource(a_path));
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> b, OpenAnySource(b_path));
  const std::string &a_name = a->description().path, &b_name = b->description().path;
  std::map<std::pair<std::string, std::string>, size_t> in_b;
  for (size_t i = 0; i < b->tensors().size(); ++i)
    in_b[{b->tensors()[i].name, b->tensors()[i].state}] = i;
  std::vector<std::string> lines;
  if (a->description().state != b->description().state) {
    lines.push_back(absl::StrCat("the steps or the loss scaler differ: step ",
                                 a->description().state.finished_steps, " and ",
                                 b->description().state.finished_steps));
  }
  int64_t total = 0, same = 0;
  for (const TensorInfo& tensor : a->tensors()) total += tensor.elements();
  {
    ProgressBar bar("comparing", total);
    for (size_t i = 0; i < a->tensors().size(); ++i) {
      const TensorInfo& tensor = a->tensors()[i];
      const auto found = in_b.find({tensor.name, tensor.state});
      if (found == in_b.end()) {
        lines.push_back(absl::StrCat(Described(tensor), " is only in '", a_name, "'"));
        continue;
      }
      const TensorInfo& other = b->tensors()[found->second];
      if (other.shape != tensor.shape) {
        lines.push_back(absl::StrCat(Described(tensor), " has the shapes ", ShapeText(tensor.shape),
                                     " and ", ShapeText(other.shape)));
      } else {
        EBB_ASSIGN_OR_RETURN(
            const TensorDifference difference,
            Compare(*a, i, *b, found->second, [&](int64_t done) { bar.Add(done); }));
        if (difference.elements > 0) {
          lines.push_back(absl::StrFormat("%s: %d of %d elements differ, by at most %.9g",
                                          Described(tensor), difference.elements, tensor.elements(),
                                          difference.most));
        } else {
          ++same;
        }
      }
      in_b.erase(found);
    }
  }
  for (const auto& [name, index] : in_b)
    lines.push_back(absl::StrCat(Described(b->tensors()[index]), " is only in '", b_name, "'"));
  for (const std::string& line : lines) absl::PrintF("%s\n", line);
  absl::PrintF("%d tensors have the same bits\n", same);
  return lines.empty() ? kDone : kOther;
}

}  // namespace ebb
