// The map that answers to the pointer: the character under it asks, and each earlier one is
// coloured by the weight that the chosen head gives it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("map-data").textContent);
  const packed = Uint8Array.from(atob(data.weights), (c) => c.charCodeAt(0));
  const length = data.tokens.length;
  const text = document.querySelector("#map .text");
  const layer = document.getElementById("layer");
  const head = document.getElementById("head");
  const said = document.querySelector("#map output");
  let asking = data.start[2];

  // A byte is the square root of a weight, times 255 (tour/heads.py, packed).
  function weight(query, key) {
    const plane = Number(layer.value) * data.heads + Number(head.value);
    return (packed[(plane * length + query) * length + key] / 255) ** 2;
  }

  function name(token) {
    return { " ": "blank", "\n": "end of line" }[token] || (token.trim() ? token : "indentation");
  }

  function show(query) {
    asking = query;
    const weights = [...spans].map((_, key) => (key <= query ? weight(query, key) : 0));
    const most = Math.max(...weights);
    spans.forEach((span, key) => {
      span.style.backgroundColor = `rgba(232, 89, 12, ${(0.85 * weights[key]) / most || 0})`;
      span.classList.toggle("asking", key === query);
      span.classList.toggle("later", key > query);
    });
    const best = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 3);
    const parts = best
      .filter((key) => weights[key] >= 0.01)
      .map((key) => `“${name(data.tokens[key])}” ${back(query - key)} ${Math.round(100 * weights[key])} %`);
    said.textContent = `“${name(data.tokens[query])}” looks at ${parts.join(", ")}`;
  }

  function back(distance) {
    return distance === 0 ? "(itself)" : `(${distance} back)`;
  }

  function choices(select, count, what, chosen) {
    for (let i = 0; i < count; i++) select.add(new Option(`${what} ${i + 1}`, i, false, i === chosen));
    select.addEventListener("change", () => show(asking));
  }

  const spans = data.tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token === "\n" ? "⏎\n" : token;
    span.dataset.place = i;
    return text.appendChild(span);
  });
  const place = (event) => event.target.dataset && event.target.dataset.place;
  for (const kind of ["pointerover", "pointerdown"]) {
    text.addEventListener(kind, (event) => place(event) && show(Number(place(event))));
  }
  text.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.min(length - 1, Math.max(0, asking + step)));
  });
  choices(layer, data.layers, "layer", data.start[0]);
  choices(head, data.heads, "head", data.start[1]);
  show(asking);
})();
