(root) => {
  const panel = root.querySelector(".panel");
  const [hint, text] = [panel.querySelector(".hint"), panel.querySelector("pre")];
  const nodes = [...root.querySelectorAll(".node")];
  const parts = [...nodes, ...root.querySelectorAll(".edge")];
  const about = new Map(parts.map((p) => [p, new Set(p.dataset.about.split(" ").filter(Boolean))]));
  const words = (node) => root.querySelector(`[data-of="${node.dataset.words}"]`).textContent;
  let pinned = null;

  const light = (keys, also = null) => {
    root.classList.toggle("active", keys !== null);
    for (const part of parts) {
      const same = also !== null && part.dataset.words === also.dataset.words;
      const on = keys !== null && (same || [...about.get(part)].some((k) => keys.has(k)));
      part.classList.toggle("on", on);
    }
  };
  const show = (node) => {
    light(node && about.get(node), node);
    for (const n of nodes) n.classList.toggle("chosen", n.dataset.words === node?.dataset.words);
    text.textContent = node ? words(node) : "";
    hint.hidden = node !== null;
  };
  const pin = (node) => {
    if (pinned) pinned.setAttribute("aria-pressed", "false");
    pinned = node === pinned ? null : node;
    if (pinned) pinned.setAttribute("aria-pressed", "true");
    show(pinned);
  };

  for (const node of nodes) {
    node.querySelector("title").remove(); // the panel says more
    const hovered = (event) => event.pointerType !== "touch" && !pinned; // a tap is a click
    node.addEventListener("pointerenter", (event) => hovered(event) && show(node));
    node.addEventListener("pointerleave", (event) => hovered(event) && show(null));
    node.addEventListener("focus", () => pinned || show(node));
    node.addEventListener("blur", () => pinned || show(null));
    node.addEventListener("click", (event) => { event.stopPropagation(); pin(node); });
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pin(node); }
    });
  }
  for (const svg of root.querySelectorAll("svg"))
    svg.addEventListener("click", () => pinned && pin(pinned));
  root.addEventListener("keydown", (event) => event.key === "Escape" && pinned && pin(pinned));

  const search = root.querySelector(".search");
  const named = nodes.filter((n) => n.querySelector(".bar"));
  const nameOf = (n) => words(n).split(": ")[0].toLowerCase();
  const count = new Set(named.map((n) => n.dataset.words)).size; // two drawings show each
  search.hidden = count < Number(search.dataset.from);
  search.addEventListener("input", () => {
    if (pinned) pin(pinned);
    const wanted = search.value.trim().toLowerCase();
    const found = named.filter((n) => nameOf(n).includes(wanted));
    light(wanted ? new Set(found.flatMap((n) => [...about.get(n)])) : null);
    const first = found.find((n) => n.getClientRects().length); // of the drawing that is shown
    if (wanted && first) first.scrollIntoView({ block: "center", inline: "nearest" });
  });
  panel.hidden = false;
}
