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
      const on = keys !== null && (part === also || [...about.get(part)].some((k) => keys.has(k)));
      part.classList.toggle("on", on);
    }
  };
  const show = (node) => {
    light(node && about.get(node), node);
    for (const n of nodes) n.classList.toggle("chosen", n === node);
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
    node.addEventListener("pointerenter", () => pinned || show(node));
    node.addEventListener("pointerleave", () => pinned || show(null));
    node.addEventListener("focus", () => pinned || show(node));
    node.addEventListener("blur", () => pinned || show(null));
    node.addEventListener("click", (event) => { event.stopPropagation(); pin(node); });
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pin(node); }
    });
  }
  root.querySelector("svg").addEventListener("click", () => pinned && pin(pinned));
  root.addEventListener("keydown", (event) => event.key === "Escape" && pinned && pin(pinned));

  const search = root.querySelector(".search");
  const named = nodes.filter((n) => n.querySelector(".bar"));
  const nameOf = (n) => words(n).split(": ")[0].toLowerCase();
  search.hidden = named.length < Number(search.dataset.from);
  search.addEventListener("input", () => {
    if (pinned) pin(pinned);
    const wanted = search.value.trim().toLowerCase();
    const found = named.filter((n) => nameOf(n).includes(wanted));
    light(wanted ? new Set(found.flatMap((n) => [...about.get(n)])) : null);
    if (wanted && found.length) found[0].scrollIntoView({ block: "center", inline: "nearest" });
  });
  panel.hidden = false;
}
