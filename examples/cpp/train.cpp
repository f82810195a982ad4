// Trains the language model of letters.h and saves it: train letters.pt
//
// Exits with 1 if the model has not learnt to put the letters of new words in order.
#include <iomanip>
#include <iostream>

#include "letters.h"

// Texts [2 * n + 2, B] of new words, which have n letters each.
Tensor draw(int64_t n, int64_t size) {
  const Tensor words = torch::rand({kLetters, size}).argsort(int64_t(0)).slice(0, 0, n);
  const Tensor row = torch::ones({1, size}, torch::kLong);
  return torch::cat({words, row * kSort, std::get<0>(words.sort(int64_t(0))), row * kEnd});
}

// The logits [n + 1, B, kTokens] of what follows '>'; the letters before it cannot be known.
Tensor predict(Letters& model, const Tensor& texts, int64_t n) {
  return model(texts.slice(0, 0, -1)).slice(0, n);
}

// The share of new words of any length whose letters the model puts in order without a mistake.
double accuracy(Letters& model) {
  torch::NoGradGuard guard;
  double sum = 0;
  for (int64_t n = 1; n <= kLongestWord; ++n) {
    const Tensor texts = draw(n, 100);
    const Tensor right = predict(model, texts, n).argmax(-1).eq(texts.slice(0, n + 1)).all(0);
    sum += right.to(torch::kDouble).mean().item<double>();
  }
  return sum / kLongestWord;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: train FILE, to which the trained model is written\n";
    return 2;
  }
  torch::manual_seed(0);
  Letters model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));
  torch::optim::StepLR schedule(optimizer, 150,
                                0.3);  // every 150 steps the rate falls to 0.3 of it
  std::cout << std::fixed << std::setprecision(3) << "before training: accuracy " << accuracy(model)
            << " on new words\n";

  for (int step = 1; step <= 450; ++step) {
    const int64_t n = torch::randint(1, kLongestWord + 1, {}).item<int64_t>();
    const Tensor texts = draw(n, 64);
    optimizer.zero_grad();
    const Tensor loss = nn::functional::cross_entropy(predict(model, texts, n).flatten(0, 1),
                                                      texts.slice(0, n + 1).flatten());
    loss.backward();
    optimizer.step();
    schedule.step();
    if (step % 50 == 0)
      std::cout << "step " << step << ": loss " << loss.item<double>() << ", accuracy "
                << accuracy(model) << "\n";
  }

  if (accuracy(model) < 0.97) {
    std::cout << "The model has not learnt the alphabet.\n";
    return 1;
  }
  torch::save(model, argv[1]);
  std::cout << "saved to " << argv[1] << "\n";
  return 0;
}
