// Shows the values under the pointer. Without this script the charts stand all the same.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("hover").textContent);
  const box = document.getElementById("tip");
  for (const [key, data] of Object.entries(charts)) {
    const svg = document.getElementById("chart-" + key);
    if (!svg || !data.x.length) continue;
    const cursor = svg.querySelector(".cursor");
    const hide = () => { box.hidden = true; cursor.classList.remove("on"); };
    const show = (event) => {
      const frame = svg.getBoundingClientRect();
      const at = (event.clientX - frame.left) * svg.viewBox.baseVal.width / frame.width;
      let best = 0;
      data.x.forEach((x, i) => { if (Math.abs(x - at) < Math.abs(data.x[best] - at)) best = i; });
      cursor.setAttribute("x1", data.x[best]);
      cursor.setAttribute("x2", data.x[best]);
      cursor.classList.add("on");
      box.replaceChildren();
      const title = document.createElement("b");
      title.textContent = data.title[best];
      box.append(title);
      for (const [colour, name, value] of data.rows[best]) {
        const row = document.createElement("div");
        const dot = document.createElement("i");
        dot.className = "dot " + (typeof colour === "number" ? "d" + colour : colour);
        const strong = document.createElement("span");
        strong.textContent = value;
        row.append(dot, name + " ", strong);
        box.append(row);
      }
      box.hidden = false;
      const wide = box.offsetWidth, right = event.clientX + 16 + wide > document.documentElement.clientWidth;
      box.style.left = Math.max(4, right ? event.clientX - wide - 14 : event.clientX + 16) + "px";
      box.style.top = Math.max(4, event.clientY - box.offsetHeight - 10) + "px";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
})();
