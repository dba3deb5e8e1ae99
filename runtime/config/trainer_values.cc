#include "ebb/runtime/config/trainer_values.h"

#include "ebb/runtime/config/key_rows.h"
#include "ebb/runtime/config/message.h"

namespace ebb::config {
namespace {

constexpr std::string_view kOptimizerParameters[] = {
    "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay"};
constexpr std::string_view kTotalSteps = "scheduler.params.total_num_steps";

bool IsTrue(const Json* value) {
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

void Append(std::string_view sentence, std::string& list) {
  list += Join({list.empty() ? "" : ", ", sentence});
}

}  // namespace

TrainersShare::TrainersShare(const TrainerValues& trainer) {
  const auto know = [&](std::string_view path, const auto& value) {
    if (value.has_value()) known_.emplace_back(path, Json(*value));
  };
  know("train_micro_batch_size_per_gpu", trainer.micro_batch_size);
  know("gradient_accumulation_steps", trainer.gradient_accumulation_steps);
  know("gradient_clipping", trainer.gradient_clipping);
  know("optimizer.params.lr", trainer.learning_rate);
  if (trainer.beta1.has_value() && trainer.beta2.has_value()) {
    known_.emplace_back("optimizer.params.betas", Json::array({*trainer.beta1, *trainer.beta2}));
  }
  know("optimizer.params.eps", trainer.epsilon);
  know("optimizer.params.weight_decay", trainer.weight_decay);
  know("scheduler.params.warmup_num_steps", trainer.warmup_steps);
  know(kTotalSteps, trainer.total_steps);
  if (trainer.compute.has_value()) {
    known_.emplace_back("fp16.enabled", *trainer.compute == DType::kFloat16);
    known_.emplace_back("bf16.enabled", *trainer.compute == DType::kBFloat16);
  }
}

const Json* TrainersShare::Find(std::string_view path) const {
  for (const auto& [known, value] : known_) {
    if (known == path) return &value;
  }
  return nullptr;
}

// Replaces how an "auto" was taken, or adds a key that the file does not have.
void TrainersShare::Say(const std::string& shown, std::string how) {
  for (TakenKey& taken : *keys_) {
    if (taken.shown == shown) {
      taken.how = std::move(how);
      return;
    }
  }
  keys_->push_back({shown, "(missing)", std::move(how), FindKey(shown)});
}

bool TrainersShare::Put(std::string_view path, Values& values, Problems& problems) {
  const Json* value = Find(path);
  if (value == nullptr) return false;
  const Key& key = *FindKey(path);
  Given& given = values.given[key.path];
  if (given.shown.empty()) given.shown = path;
  if (!Check(key, *value, Join({"the trainer's ", given.shown}), problems)) return false;
  given.value = value;
  Append(Join({Quoted(given.shown), " ", Shown(*value)}), filled_);
  Say(given.shown, Join({"filled in by the trainer: ", Shown(*value)}));
  return true;
}

void TrainersShare::FillAuto(Values& values, Problems& problems) {
  const bool other_is_on =
      IsTrue(values.Value("fp16.enabled")) || IsTrue(values.Value("bf16.enabled"));
  for (auto& [path, given] : values.given) {
    if (given.value != nullptr) continue;
    // If the total is known, the arithmetic of the triple gives the two others.
    const bool is_derived =
        path == "train_batch_size" ||
        (values.Value("train_batch_size") != nullptr &&
         (path == "train_micro_batch_size_per_gpu" || path == "gradient_accumulation_steps"));
    const bool is_other_precision =
        other_is_on && (path == "fp16.enabled" || path == "bf16.enabled");
    if (is_derived) {
      Say(given.shown, "derived from the other sizes of the batch");
    } else if (path == "scheduler.params.warmup_max_lr") {
      Say(given.shown, "the optimizer's rate");
    } else if (is_other_precision || !Put(path, values, problems)) {
      const Row& row = FindRow(path);
      const bool is_own = HasWord(row.own_default_for, values.Type("optimizer"));
      const std::string_view value = is_own ? row.own_default : row.default_value;
      Append(Join({Quoted(given.shown), " ", value.empty() ? "not given" : value}), left_);
      Say(given.shown, "the default");
    }
  }
}

void TrainersShare::FillMissing(Values& values, Problems& problems) {
  const auto has_number = [&](std::string_view path) { return values.Value(path) != nullptr; };
  if (!has_number("train_batch_size") && !has_number("train_micro_batch_size_per_gpu")) {
    Put("train_micro_batch_size_per_gpu", values, problems);
  }
  if (values.Find("optimizer.type") == nullptr) {
    for (std::string_view path : kOptimizerParameters) {
      if (values.Value(path) == nullptr) Put(path, values, problems);
    }
  }
  if (!has_number(kTotalSteps) &&
      HasWord(FindRow(kTotalSteps).required_for, values.Type("scheduler"))) {
    Put(kTotalSteps, values, problems);
  }
}

void TrainersShare::Fill(Reading& reading, Problems& problems) {
  keys_ = &reading.keys;
  FillAuto(reading.values, problems);
  for (auto& [name, group] : reading.values.groups) FillAuto(group, problems);
  FillMissing(reading.values, problems);
  if (!filled_.empty()) Remark(reading.remarks, Join({"filled in by the trainer: ", filled_}));
  if (!left_.empty()) Remark(reading.remarks, Join({"\"auto\" taken as the default: ", left_}));
}

}  // namespace ebb::config
