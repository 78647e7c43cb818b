// In a page with an iframe a width: writes what leaves its page sideways, which texts
// overlap, and which are squeezed.
function visible(rect, element) {
  // The part of a rectangle that no ancestor hides.
  let box = {left: rect.left, top: rect.top, right: rect.right, bottom: rect.bottom};
  for (let e = element; e && e.nodeType === 1; e = e.parentElement) {
    const style = e.ownerDocument.defaultView.getComputedStyle(e);
    if (style.visibility === "hidden") return null;
    if (style.overflowX !== "visible" && e.tagName !== "HTML" && e.tagName !== "BODY" &&
        e.tagName.toLowerCase() !== "svg") {
      const clip = e.getBoundingClientRect();
      box = {left: Math.max(box.left, clip.left), top: Math.max(box.top, clip.top),
             right: Math.min(box.right, clip.right), bottom: Math.min(box.bottom, clip.bottom)};
    }
  }
  return box.right - box.left > 1 && box.bottom - box.top > 1 && box.right > 0 ? box : null;
}
function texts(page) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim() || node.parentElement.closest("title, style, .skip, nav")) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const box = visible(rect, node.parentElement);
      if (box) found.push({box, node, text: node.data.trim().slice(0, 40)});
    }
  }
  return found.sort((a, b) => a.box.top - b.box.top);
}
function problems(page) {
  const found = [], width = page.documentElement.clientWidth;
  const over = page.documentElement.scrollWidth - width;
  if (over > 0) found.push(`the page is ${over} pixels wider than ${width}`);
  const all = texts(page);
  for (let i = 0; i < all.length; i++) {
    const a = all[i].box;
    if (a.right > width + 1) found.push(`${all[i].text} leaves the page`);
    for (let j = i + 1; j < all.length && all[j].box.top < a.bottom; j++) {
      const b = all[j].box;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // Lines of one paragraph are nearer than their glyphs' boxes are high.
      const least = 0.35 * Math.min(a.bottom - a.top, b.bottom - b.top);
      if (wide > 2 && high > least && all[i].node !== all[j].node)
        found.push(`"${all[i].text}" over "${all[j].text}"`);
    }
  }
  // A table scrolls sideways: none of its long texts stands one word a line.
  for (const cell of page.querySelectorAll(".scroll tbody th, .scroll tbody td"))
    if (cell.textContent.length > 28 && cell.offsetWidth && cell.offsetWidth < 100)
      found.push(`"${cell.textContent.slice(0, 40)}" in ${cell.offsetWidth} pixels`);
  return {texts: all.length, problems: found.slice(0, 20)};
}
window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe"))
    found[frame.getAttribute("width")] = problems(frame.contentDocument);
  document.body.textContent = "LAYOUT " + JSON.stringify(found) + " END";
};
