/* A trainer in C99: a perceptron learns a sine, with all state in shards (ZeRO-3). docs/c.md explains its calls.
 *
 *   build/release/bin/c_mlp                                                  one rank
 *   torchrun --nproc-per-node 2 --no-python build/release/bin/c_mlp          two ranks; or with mpirun, srun */
#include "ebb/runtime/c/ebb.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kLayers = 3, kBatch = 32, kWidthMax = 64, kSteps = 500 };
static const int kIn[kLayers] = {16, 64, 64}, kOut[kLayers] = {64, 64, 1};
static const char kConfig[] =
    "{\"train_micro_batch_size_per_gpu\": 32, \"zero_optimization\": {\"stage\": 3},"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.003}}}";

typedef struct {
  int32_t unit, weight, bias;
  const float *w, *b; /* where every scope of the unit shows them */
} Layer;

static void Check(int32_t code) {
  if (code == 0) return;
  fprintf(stderr, "mlp: %s (code %d)\n", ebb_error(), (int)code);
  exit(1);
}

static uint32_t Random(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* Initial weights: a function of the parameter and the index alone, so that any number of ranks has the same model. */
static int32_t Fill(void* user, int32_t parameter, int64_t begin, int64_t end, float* values) {
  const float scale = *(const float*)user;
  for (int64_t i = begin; i < end; ++i) {
    uint32_t state = (uint32_t)(parameter * 7919 + i * 104729);
    Random(&state);
    values[i - begin] = scale * ((float)Random(&state) / 8388608.0f - 1.0f);
  }
  return 0;
}

static int32_t AddParameter(ebb_model* model, int32_t unit, const char* name, int32_t dimensions,
                            const int64_t* shape, float* scale) {
  ebb_parameter parameter = {.struct_size = sizeof parameter};
  parameter.trainable = 1;
  parameter.name = name;
  parameter.shape = shape;
  parameter.dimensions = dimensions;
  parameter.fill = Fill;
  parameter.user = scale;
  const int32_t id = ebb_model_add_parameter(model, unit, &parameter);
  if (id < 0) Check(EBB_INVALID_ARGUMENT);
  return id;
}

int main(void) {
  ebb_world* world;
  Check(ebb_world_open(NULL, &world));
  ebb_world_facts facts = {.struct_size = sizeof facts};
  Check(ebb_world_describe(world, &facts));

  ebb_model* model = ebb_model_create();
  Layer layers[kLayers];
  static float scales[kLayers], zero = 0;
  for (int i = 0; i < kLayers; ++i) {
    char name[16];
    snprintf(name, sizeof name, "layer%d", i);
    layers[i].unit = ebb_model_add_unit(model, name, 0);
    const int64_t shape[2] = {kOut[i], kIn[i]};
    scales[i] = sqrtf(3.0f / (float)kIn[i]);
    snprintf(name, sizeof name, "w%d", i);
    layers[i].weight = AddParameter(model, layers[i].unit, name, 2, shape, &scales[i]);
    snprintf(name, sizeof name, "b%d", i);
    layers[i].bias = AddParameter(model, layers[i].unit, name, 1, shape, &zero);
    ebb_visit visit = {sizeof visit, layers[i].unit, 1, 1, 1};
    if (ebb_model_add_visit(model, &visit) < 0) Check(EBB_INVALID_ARGUMENT);
  }

  ebb_engine* engine;
  Check(ebb_engine_create(world, model, kConfig, NULL, &engine));
  ebb_model_destroy(model);
  for (int i = 0; i < kLayers; ++i) {
    ebb_view views[2];
    int32_t count;
    Check(ebb_engine_views(engine, layers[i].unit, views, 2, &count));
    layers[i].w = views[0].data;
    layers[i].b = views[1].data;
  }

  static float x[kLayers + 1][kBatch * kWidthMax], dx[kLayers + 1][kBatch * kWidthMax];
  uint32_t random = (uint32_t)facts.rank + 1; /* each rank draws its own samples */
  ebb_report report = {.struct_size = sizeof report};
  double first_loss = 0;
  for (int n = 1; n <= kSteps; ++n) {
    for (int i = 0; i < kBatch * kIn[0]; ++i) x[0][i] = (float)Random(&random) / 4194304.0f - 2.0f;
    Check(ebb_step_begin(engine, NULL));
    int64_t scope;
    for (int l = 0; l < kLayers; ++l) {
      Check(ebb_scope_open(engine, EBB_FORWARD, layers[l].unit, &scope)); /* the parameters are here ... */
      for (int b = 0; b < kBatch; ++b)
        for (int o = 0; o < kOut[l]; ++o) {
          float sum = layers[l].b[o];
          for (int k = 0; k < kIn[l]; ++k) sum += layers[l].w[o * kIn[l] + k] * x[l][b * kIn[l] + k];
          x[l + 1][b * kOut[l] + o] = l + 1 < kLayers && sum < 0 ? 0 : sum;
        }
      Check(ebb_scope_close(engine, scope)); /* ... and gone here */
    }
    float loss = 0;
    for (int b = 0; b < kBatch; ++b) {
      const float error = x[kLayers][b] - sinf(x[0][b * kIn[0]]);
      loss += error * error / kBatch;
      dx[kLayers][b] = 2 * error / kBatch;
    }
    Check(ebb_add_loss(engine, &loss));
    for (int l = kLayers - 1; l >= 0; --l) {
      Check(ebb_scope_open(engine, EBB_BACKWARD, layers[l].unit, &scope));
      const int32_t parameters[2] = {layers[l].weight, layers[l].bias};
      ebb_gradient gradients[2];
      Check(ebb_scope_gradients(engine, scope, parameters, 2, gradients));
      float *dw = gradients[0].data, *db = gradients[1].data;
      if (gradients[0].first) memset(dw, 0, sizeof(float) * (size_t)gradients[0].elements);
      if (gradients[1].first) memset(db, 0, sizeof(float) * (size_t)gradients[1].elements);
      memset(dx[l], 0, sizeof dx[l]);
      for (int b = 0; b < kBatch; ++b)
        for (int o = 0; o < kOut[l]; ++o) {
          const int at = b * kOut[l] + o;
          const float d = l + 1 < kLayers && x[l + 1][at] <= 0 ? 0 : dx[l + 1][at];
          db[o] += d;
          for (int k = 0; k < kIn[l]; ++k) {
            dw[o * kIn[l] + k] += d * x[l][b * kIn[l] + k];
            dx[l][b * kIn[l] + k] += d * layers[l].w[o * kIn[l] + k];
          }
        }
      Check(ebb_scope_close(engine, scope)); /* the gradients are on their way */
    }
    Check(ebb_step_finish(engine, NULL));
    Check(ebb_step_report(engine, &report));
    if (n == 1) first_loss = report.loss;
    if (facts.rank == 0 && n % 100 == 0) printf("step %d  loss %.4f\n", n, report.loss);
  }
  Check(ebb_engine_close(engine));
  ebb_engine_destroy(engine);
  ebb_world_close(world);
  return report.loss < first_loss / 4 ? 0 : 1;
}
